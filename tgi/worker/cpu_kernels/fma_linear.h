// Products with packed weights on the FMA engine.
//
// Few rows read each panel of the weight once. Many rows go over a panel in parts that stay in the L1 cache: numbers are
// widened each time, which takes one instruction for several multiplications; codes are turned into float32 once.
#pragma once
#include "epilogue.h"
#include "fma_decoders.h"
#include "linear_job.h"

namespace tgi {

// Reads float32 sums [rows][32], times the scales of the outputs if there are any.
struct ScaledSums {
    Float of(int half) const {
        const Float sum = load(at + LANES * half);
        return scales ? sum * load(scales + LANES * half) : sum;
    }
    void next(int64_t rows) { at += rows * PANEL; }

    const float *at, *scales;
};

// The sums of the rows' inputs in each group, and for 4-bit integers the rows as their factors (NibbleBlock).
struct GroupSumsJob final : Job {
    GroupSumsJob(const OperandRows& x, int64_t rows, int64_t group, float* sums, float* factors)
        : x(x), rows(rows), group(group), sums(sums), factors(factors) {}

    int64_t chunks() const { return rows <= CHUNK ? 1 : (rows + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * CHUNK, last = std::min(first + CHUNK, rows);
        const float* const end = x.at + last * x.step;
        float* to = sums + first * (x.step / group);
        for (const float* at = x.at + first * x.step; at < end; at += group) {
            Float sum = zeros();
            for (int64_t k = 0; k < group; k += LANES) sum = sum + load(at + k);
            *to++ = reduce_add(sum);
        }
        if (!factors) return;
        for (int64_t k = first * x.step; k < last * x.step; k += 2) {
            const float odd = x.at[k + 1] / 16;
            factors[k] = x.at[k] - odd;
            factors[k + 1] = odd;
        }
    }

    static constexpr int64_t CHUNK = 16;  // rows of a chunk
    const OperandRows x;
    const int64_t rows, group;
    float *const sums, *const factors;  // factors: none for other codes
};

// Bytes of a part of 16 outputs that stays in the L1 cache next to the rows.
constexpr int64_t PART_BYTES = 16384, MAX_PART_INPUTS = PART_BYTES / LANES / sizeof(bf16);

// The buffers of a thread, for all kinds of formats: the first access to any thread-local variable of a library writes all
// of them.
struct FmaWorkspace {
    alignas(64) float sums[MAX_CHUNK_ROWS + FMA_ROWS][PANEL];
    alignas(64) float columns[MAX_PART_INPUTS / 2 + 128][PANEL];  // decoded; a part has whole groups
};

inline FmaWorkspace& fma_workspace() {
    static thread_local FmaWorkspace one;
    return one;
}

template <FormatKind kind>
struct FmaLinearJob final : LinearJob {
    // `x_sums`: the sums of GroupSumsJob, of a weight in groups.
    FmaLinearJob(const LinearCall& call, const OperandRows& x, const float* x_sums, int64_t threads)
        : LinearJob(call, chunk_rows(call, FMA_ROWS), threads), x(x), depth(x.step), x_sums(x_sums),
          x_sums_step(w.form.group ? x.step / w.form.group : 0) {}

    void compute(int64_t row, int64_t rows, int64_t first, int64_t last) const override {
        const auto with = [&](const auto& columns_at) {
            if (rows <= FMA_ROWS) few_rows(row, rows, first, last, columns_at);
            else many_rows(row, rows, first, last, columns_at);
        };
        with_columns<kind>(w, with);
    }

  private:
    void finish(int64_t number, int64_t row, int64_t rows, const float* sums) const {
        const auto* scales = w.form.integer ? (const float*)w.panel(number) : nullptr;
        apply_epilogue(call_of(number), row, rows, first_output(number), ScaledSums{sums, scales});
    }

    // The sums of up to FMA_ROWS rows times `inputs` inputs from k on; added to those before if k > 0.
    template <class Columns>
    void multiply(int64_t row, int64_t rows, int64_t k, int64_t inputs, const Columns& columns, float* sums) const {
        const float* from = x.at + row * x.step + k;
        if constexpr (IS_GROUPED<Columns>) {
            const float* group_sums = x_sums + row * x_sums_step + k / w.form.group;
            if (columns.decoded)
                fma_few_groups<true>(from, x.step, rows, group_sums, x_sums_step, columns, inputs, k > 0, sums);
            else fma_few_groups<false>(from, x.step, rows, group_sums, x_sums_step, columns, inputs, k > 0, sums);
        } else {
            Columns again = columns;
            if (k) fma_few_rows<true>(from, x.step, rows, again, inputs, sums, PANEL);
            else fma_few_rows<false>(from, x.step, rows, again, inputs, sums, PANEL);
        }
    }

    template <class ColumnsAt>
    void few_rows(int64_t row, int64_t rows, int64_t first, int64_t last, const ColumnsAt& columns_at) const {
        alignas(64) float sums[FMA_ROWS][PANEL];
        int64_t number = first;
        if constexpr (IS_PLAIN<decltype(columns_at(0, 0))>)
            for (; rows == 1 && number + 1 < last; number += 2) {
                decltype(columns_at(0, 0)) columns[] = {columns_at(number, 0), columns_at(number + 1, 0)};
                fma_two_blocks(x.at + row * x.step, columns, depth, sums[0]);
                for (int which = 0; which < 2; which++) finish(number + which, row, 1, sums[which]);
            }
        for (; number < last; number++) {
            multiply(row, rows, 0, depth, columns_at(number, 0), sums[0]);
            finish(number, row, rows, sums[0]);
        }
    }

    template <class ColumnsAt>
    void many_rows(int64_t row, int64_t rows, int64_t first, int64_t last, const ColumnsAt& columns_at) const {
        const int64_t unit = w.form.unit(), most = w.form.bits == 16 ? MAX_PART_INPUTS : MAX_PART_INPUTS / 2;
        const int64_t parts = (depth + most - 1) / most, part = (depth / unit + parts - 1) / parts * unit;
        for (int64_t number = first; number < last; number++)
            for (int64_t k = 0; k < depth; k += part) {
                const int64_t inputs = std::min(part, depth - k);
                const auto columns = decoded_columns(columns_at(number, k), inputs);
                part_of_rows(number, row, rows, k, inputs, columns);
            }
    }

    // The sums of all rows times a part of a panel, and the epilogue after the last part.
    template <class Columns>
    void part_of_rows(int64_t number, int64_t row, int64_t rows, int64_t k, int64_t inputs, const Columns& columns)
        const {
        auto& sums = fma_workspace().sums;
        int64_t groups = (rows + FMA_ROWS - 1) / FMA_ROWS;  // of about equal size: two of 4 rows instead of 6 and 2
        for (int64_t done = 0; done < rows; groups--) {
            const int64_t count = (rows - done + groups - 1) / groups;
            multiply(row + done, count, k, inputs, columns, sums[done]);
            if (k + inputs == depth) finish(number, row + done, count, sums[done]);
            done += count;
        }
    }

    // The columns that many rows are multiplied with: numbers as they are, codes as float32.
    template <class T>
    static PanelColumns<T> decoded_columns(const PanelColumns<T>& columns, int64_t) { return columns; }

    template <class Columns>
    static auto decoded_columns(Columns columns, int64_t inputs) {
        auto& room = fma_workspace().columns;
        if constexpr (IS_GROUPED<Columns>) {
            const uint8_t* codes = columns.at + columns.header;
            const int64_t blocks = std::max<int64_t>(columns.group / 32, 1);
            using Block = typename Columns::Block;
            using Code = std::remove_reference_t<decltype(*Block::at)>;
            for (int64_t k = 0; k < inputs; codes += columns.unit_bytes)
                for (int64_t n = 0; n < blocks; n++, k += 32)
                    decode_block(Block{(Code*)codes + n * Block::SIZE}, room[k]);
            columns.decoded = room[0];
            return columns;
        } else {
            for (int64_t k = 0; k < inputs; k += 32) decode_block(FmaBlock<Columns>(columns), room[k]);
            return DecodedColumns{{room[0]}};
        }
    }

    template <class Block>
    static void decode_block(const Block& block, float* to) {
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int j = 0; j < 16; j++) {
                if (!half) prefetch_pair(block, j);
                store(to + 512 * half + 32 * j, block.template input<0>(j, half), block.template input<1>(j, half));
            }
    }

    const OperandRows x;
    const int64_t depth;
    const float* const x_sums;
    const int64_t x_sums_step;
};

// The rows of a call and, for a weight in groups, the sums of GroupSumsJob; valid until the next call.
struct FmaOperands {
    OperandRows x;
    const float* sums;
};

inline FmaOperands fma_operands(ThreadPool& pool, const LinearCall& call) {
    OperandRows x = operand_rows(pool, call);
    static thread_local std::vector<float> sums, factors;
    if (const int64_t group = call.weight.form.group) {
        const bool has_factors = call.weight.form.kind() == FormatKind::four_bit_groups;
        if ((int64_t)sums.size() < call.rows * x.step / group) sums.resize(call.rows * x.step / group);
        if (has_factors && (int64_t)factors.size() < call.rows * x.step) factors.resize(call.rows * x.step);
        const GroupSumsJob job(x, call.rows, group, sums.data(), has_factors ? factors.data() : nullptr);
        pool.run(job, job.chunks());
        if (has_factors) x.at = factors.data();
    }
    return {x, sums.data()};
}

template <FormatKind kind>
void linear_of(ThreadPool& pool, const LinearCall& call) {
    const FmaOperands operands = fma_operands(pool, call);
    const FmaLinearJob<kind> job(call, operands.x, operands.sums, pool.threads());
    pool.run(job, job.queue.threads());
}

template <FormatKind kind>
void grouped_linear_of(ThreadPool& pool, const LinearCall& call, const std::vector<WeightRows>& groups) {
    const FmaOperands operands = fma_operands(pool, call);
    const int64_t sums_step = call.weight.form.group ? operands.x.step / call.weight.form.group : 0;
    GroupedLinearJob<FmaLinearJob<kind>> all;
    for (const WeightRows& group : groups)
        all.jobs.emplace_back(group_call(call, group), operands.x.from(group.first),
            operands.sums + group.first * sums_step, pool.threads());
    pool.run(all, pool.threads());
}

}  // namespace tgi
