// Products with packed weights on the dot engine, in bfloat16 or with integers.
//
// Few rows read each panel of the weight once, from end to end. Many rows go over a panel in parts that stay in the L1
// cache, while the rows stay in the L2 cache and are streamed through L1. If there are several parts, partial sums are
// stored without rounding. AMX computes the sums of some rows while the epilogue of the previous rows runs; other
// instruction sets do one after the other.
#pragma once
#include "byte_planes.h"
#include "dot_decoders.h"
#include "epilogue.h"
#include "linear_job.h"

namespace tgi {

constexpr int64_t PART_INPUTS = 576;  // inputs of a panel that are computed together: 36 KB of a 48 KB L1 cache
constexpr int64_t MAX_PARTIAL_SUMS = 4096;  // rows of stored partial sums: 512 KB, a quarter of an L2 cache of 2 MB

// bfloat16 rows and float32 sums; the weight is bfloat16 or codes that are decoded to it.
template <FormatKind kind>
struct BfloatOperands {
    template <bool shifts>
    using Decoder = typename DecoderOf<kind, shifts>::Type;
    using Sum = float;
    using SumReader = FloatSums;
    static constexpr int64_t MAX_ROWS = MAX_TILE_ROWS;  // rows of a block

    RowOperand rows(int64_t row, int64_t count) const {
        return row_operand(x.at + row * x.step, x.step, count);
    }
    SumReader found(const float* sums, int64_t, const uint8_t*) const { return {sums}; }
    SumReader few_found(const float* sums, int64_t, const uint8_t*) const { return {sums}; }

    // Calls `use` with a function that makes the columns of a panel, for all inputs.
    template <class Use>
    void panels(const uint8_t* end, const Use& use) const {
        if constexpr (kind == FormatKind::numbers)
            use([=](const uint8_t* panel) { return amx_columns((const bf16*)panel, panel + PREFETCH_DISTANCE, end); });
        else with_shifts(call.weight.form, [&](auto shifts) {
            use([&](const uint8_t* panel) { return Decoder<shifts>(call.weight, panel, 0); });
        });
    }

    // Writes the columns of `depth` inputs from `k` on to `to`.
    void decode(const uint8_t* panel, int64_t k, int64_t depth, bf16* to) const {
        with_shifts(call.weight.form, [&](auto shifts) {
            Decoder<shifts> source(call.weight, panel, k);
            for (int64_t done = 0; done < depth; done += 32) source.decode(to + done * PANEL);
        });
    }

    // Whether this many rows are multiplied with two panels in alternation: decoding takes time between one cache line
    // and the next.
    bool two_panels_at_once(int64_t rows) const { return call.weight.form.bits < 16 && rows <= 16; }

    // The sums of few rows times one panel, or two: those of the second are 16 rows below.
    template <class B>
    void few_rows(const RowOperand& x, int64_t depth, float* sums, B&& panel) const { tile_matmul(x, panel, depth,
        sums, COLUMNS); }
    template <class B>
    void few_rows(const RowOperand& x, int64_t depth, float* sums, B&& left, B&& right) const {
        tile_matmul_two(x, left, right, depth, sums);
    }

    const LinearCall& call;
    const OperandRows x;
};

// Rows as 16-bit integers, with int32 sums of products of bytes. A row is two rows of bytes, so a block has half as
// many rows.
struct IntegerOperands {
    using Sum = int32_t;
    using SumReader = BytePlaneSums;
    static constexpr int64_t MAX_ROWS = MAX_TILE_ROWS / 2;

    RowOperand rows(int64_t row, int64_t count) const { return planes.rows(row, count); }

    SumReader found(const int32_t* sums, int64_t row, const uint8_t* panel) const {
        return {sums, MAX_ROWS * COLUMNS, planes.units + row, panel};
    }
    SumReader few_found(const int32_t* sums, int64_t row, const uint8_t* panel) const {
        return {sums, (uses_dot_products() ? call.rows : MAX_ROWS) * COLUMNS, planes.units + row, panel};
    }

    template <class Use>
    void panels(const uint8_t* end, const Use& use) const {
        if (call.weight.form.bits == 4) return use([&](const uint8_t* panel) { return NibbleDecoder(call.weight,
            panel, 0); });
        const int64_t head = call.weight.form.header_bytes(call.weight.inputs);
        use([=](const uint8_t* panel) { return amx_columns((const bf16*)(panel + head),
            panel + head + PREFETCH_DISTANCE, end); });
    }

    void decode(const uint8_t* panel, int64_t k, int64_t depth, bf16* to) const {
        NibbleDecoder source(call.weight, panel, 2 * k);
        for (int64_t done = 0; done < depth; done += 32) source.decode(to + done * PANEL);
    }

    bool two_panels_at_once(int64_t) const { return call.weight.form.bits == 4 &&
        call.rows <= MAX_DOT_PRODUCT_ROWS / 2; }

    // Without AMX, the upper and the lower bytes of a row are consecutive rows.
    template <class... B>
    void few_rows(const RowOperand& x, int64_t depth, int32_t* sums, B&&... panels) const {
        if (uses_dot_products()) return dot_matmul(x.at, x.step, 2 * x.first, depth, sums, COLUMNS, panels...);
        if constexpr (sizeof...(panels) == 1) tile_matmul(x, panels..., depth, sums, COLUMNS);
    }

    // Whether the call has so few rows that dot products are as fast as AMX, or faster.
    bool uses_dot_products() const { return call.rows <= MAX_DOT_PRODUCT_ROWS; }

    static constexpr int64_t MAX_DOT_PRODUCT_ROWS = MAX_DOT_ROWS / 2;
    const LinearCall& call;
    const BytePlanes planes;
};

// Stored partial sums of a thread, for all instantiations of a job: the first access to any thread-local variable of a
// library writes all of them.
template <class Sum>
inline Sum (&partial_sums())[MAX_PARTIAL_SUMS][COLUMNS] {
    alignas(64) static thread_local Sum sums[MAX_PARTIAL_SUMS][COLUMNS];
    return sums;
}

// Inputs are counted in pairs of bytes: one bfloat16 number, or two 8-bit numbers.
template <class Operands>
struct DotLinearJob : LinearJob {
    using Sum = typename Operands::Sum;
    static constexpr int64_t MAX_ROWS = Operands::MAX_ROWS;

    DotLinearJob(const LinearCall& call, const Operands& operands, int64_t threads)
        : LinearJob(call, chunk_rows(call, MAX_TILE_ROWS), threads), operands(operands),
          depth_total(w.form.padded_inputs(w.inputs) / (w.form.integer ? 2 : 1)) {}

    void compute(int64_t row, int64_t rows, int64_t first, int64_t last) const override {
        const uint8_t* end = w.panel(w.panels());
        prefetch_l2(w.panel(first), std::min((end - w.panel(first)) / CACHE_LINE, PREFETCH_DISTANCE / CACHE_LINE));
        if (rows <= std::min(MAX_ROWS, MAX_ROWS_PER_PASS)) few_rows(row, rows, first, last);
        else many_rows(row, rows, first, last);
    }

    // Few rows times some panels. If possible, each panel of the first half is computed together with one of the second
    // half: memory is slow at the start of each 4 KB page, and two alternating streams are seldom there at the same
    // time.
    void few_rows(int64_t row, int64_t rows, int64_t first, int64_t last) const {
        alignas(64) Sum sums[MAX_TILE_ROWS][COLUMNS];
        const bool two_panels_at_once = operands.two_panels_at_once(rows);
        const int64_t half = two_panels_at_once ? (last - first) / w.form.weights / 2 * w.form.weights : 0;
        const RowOperand x = operands.rows(row, rows);
        configure_tiles({x.at, x.step, x.first, two_panels_at_once ? x.first : x.second, x.apart});
        const auto put = [&](int64_t number, const Sum* found) {
            apply_epilogue(call_of(number), row, rows, first_output(number), operands.few_found(found, row,
                w.panel(number)));
        };
        operands.panels(w.panel(w.panels()), [&](auto columns) {
            for (int64_t number = first; number < first + half; number++) {
                operands.few_rows(x, depth_total, sums[0], columns(w.panel(number)), columns(w.panel(number + half)));
                put(number, sums[0]), put(number + half, sums[16]);
            }
            for (int64_t number = first + 2 * half; number < last; number++) {
                operands.few_rows(x, depth_total, sums[0], columns(w.panel(number)));
                put(number, sums[0]);
            }
        });
    }

    // Many rows times some panels, in blocks of rows. The last block starts early enough to be as high as the others;
    // it does not store the rows that the block before has stored.
    void many_rows(int64_t row, int64_t rows, int64_t first, int64_t last) const {
        Sum (&sums)[MAX_PARTIAL_SUMS][COLUMNS] = partial_sums<Sum>();
        const int64_t high = std::min(rows, MAX_ROWS), blocks = (rows + high - 1) / high;
        const int64_t unit = w.form.group ? w.form.unit() : 32, parts = (depth_total + PART_INPUTS - 1) / PART_INPUTS;
        const int64_t part = (depth_total / unit + parts - 1) / parts * unit;
        // One panel at a time if the L2 cache holds the rows; otherwise a part of the inputs times several panels.
        const int64_t together = rows <= rows_in_l2(depth_total) ? 1 : MAX_PARTIAL_SUMS / (blocks * MAX_TILE_ROWS);
        PendingEpilogue<typename Operands::SumReader> pending;
        configure_tiles(operands.rows(row, high));
        for (int64_t from = first, to; from < last; from = to) {
            to = std::min(from + together, last);
            for (int64_t k = 0; k < depth_total; k += part) {
                const int64_t depth = std::min(part, depth_total - k), rows_at_once = (high * 32 + depth - 1) / depth;
                for (int64_t number = from; number < to; number++) {
                    const auto* next = (const uint8_t*)(number + 1 < to ? panel_at(number + 1, k)
                                                        : k + part < depth_total ? panel_at(from, k + part)
                                                                         : panel_at(to, 0));
                    ColumnBlocks columns = this->columns(number, k, depth, next, w.panel(w.panels()));
                    // Each block of rows prefetches its share of what comes next.
                    columns.lines = (columns.lines + blocks - 1) / blocks;
                    for (int64_t block = 0; block < blocks; block++, columns.at -= depth * PANEL) {
                        const int64_t done = block * high, start = std::min(done, rows - high);
                        StreamedRows x{operands.rows(row + start, high)};
                        x.at += k;
                        Sum* c = sums[(parts > 1 ? (number - from) * blocks + block : block % 2) * MAX_TILE_ROWS];
                        const auto overlapped = [&] { pending.run_some(rows_at_once); };
                        if (k) tile_matmul<true>(x, columns, depth, c, COLUMNS, overlapped);
                        else tile_matmul(x, columns, depth, c, COLUMNS, overlapped);
                        pending.run_rest();
                        if (k + part < depth_total) continue;
                        const auto found = operands.found(c + (done - start) * COLUMNS, row + done, w.panel(number));
                        pending.set(call_of(number), row + done, std::min(rows - done, high), first_output(number),
                            found);
                    }
                }
            }
        }
        pending.run_rest();
    }

    // The inputs from `k` on of a panel without encoding.
    const bf16* panel_at(int64_t number, int64_t k) const {
        return (const bf16*)(w.panel(number) + w.form.header_bytes(w.inputs)) + k * PANEL; }

    // The columns of `depth` inputs from `k` on; `next` is the memory that is read after them.
    ColumnBlocks columns(int64_t number, int64_t k, int64_t depth, const uint8_t* next, const uint8_t* end) const {
        if (w.form.is_plain()) return amx_columns(panel_at(number, k), next, std::min(next + depth * PANEL * 2, end));
        alignas(64) static thread_local bf16 room[(PART_INPUTS + 128) * PANEL];  // a part consists of whole groups
        operands.decode(w.panel(number), k, depth, room);
        return amx_columns(room);
    }

    const Operands operands;
    const int64_t depth_total;
};

template <class Operands>
void run(ThreadPool& pool, const LinearCall& call, const Operands& operands) {
    const DotLinearJob<Operands> job(call, operands, pool.threads());
    pool.run(job, job.queue.threads());
}

template <FormatKind kind>
void linear_of(ThreadPool& pool, const LinearCall& call) {
    const OperandRows x = operand_rows(pool, call);
    if constexpr (kind == FormatKind::integers) run(pool, call, IntegerOperands{call, split_activations(pool, call, x)});
    else run(pool, call, BfloatOperands<kind>{call, x});
}

// `operands_of(part, group)` are the operands of the part of a call that multiplies a group.
template <class OperandsOf>
void run_groups(ThreadPool& pool, const LinearCall& call, const std::vector<WeightRows>& groups,
    const OperandsOf& operands_of) {
    std::deque<LinearCall> parts;  // operands refer to them
    GroupedLinearJob<DotLinearJob<decltype(operands_of(call, 0))>> all;
    for (size_t group = 0; group < groups.size(); group++) {
        parts.push_back(group_call(call, groups[group]));
        all.jobs.emplace_back(parts.back(), operands_of(parts.back(), group), pool.threads());
    }
    pool.run(all, pool.threads());
}

template <FormatKind kind>
void grouped_linear_of(ThreadPool& pool, const LinearCall& call, const std::vector<WeightRows>& groups) {
    const OperandRows x = operand_rows(pool, call);
    if constexpr (kind == FormatKind::integers) {
        const std::vector<BytePlanes> planes = split_groups(pool, call, x, groups);
        run_groups(pool, call, groups, [&](const LinearCall& part, int64_t group) {
            return IntegerOperands{part, planes[group]};
        });
    } else
        run_groups(pool, call, groups, [&](const LinearCall& part, int64_t group) {
            return BfloatOperands<kind>{part, x.from(groups[group].first)};
        });
}

}  // namespace tgi
