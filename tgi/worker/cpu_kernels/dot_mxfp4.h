// Products with MXFP4 weights on the dot engine (packed_weight.cpp describes the layout): y = sum over groups of 32 inputs
// of scale * unit * (sum over the group of code * integer).
//
// The activations of a group become integers of 15 bits times a unit, the power of two for which the largest magnitude
// is from 2^13 to 2^14 units; of bfloat16 numbers that is exact down to 1/128 of the largest magnitude of the group.
// Codes stand for integers of 5 bits, so the sum of a group has at most 24 bits and is exact in float32 as in int32:
// the order of its terms does not matter. Times scale and unit, powers of two, it is still exact. The sums of groups are
// added in float32, one after the other.
//
// So few rows are multiplied as bytes, without decoding to bfloat16, and many rows with AMX as bfloat16 numbers, which
// the rounded activations still are: it adds up a group from zero before it adds the sum to that of the groups before.
// Both have the same bits.
#pragma once
#include <deque>
#include <limits>
#include <vector>

#include "dot_linear.h"

namespace tgi {

// The rows of a call. Those that are multiplied as bytes have `planes` in the memory that has `numbers` of the others.
struct Mxfp4Rows {
    Mxfp4Rows from(int64_t row) const {
        return {numbers + row * inputs, units + row * (inputs / 32), offsets + row * (inputs / 32), inputs};
    }

    // Of row `row`, [2][inputs]: the upper bytes of the integers, then the lower ones, both signed.
    int8_t* planes(int64_t row) const { return (int8_t*)(numbers + row * inputs); }

    bf16* numbers;  // [rows][inputs]: the rounded activations
    float* units;  // [rows][inputs / 32]
    int32_t* offsets;  // [rows][inputs / 32]: what makes up for the offset of Float4Bytes
    int64_t inputs;
};

// Rounds the rows of a call.
struct Mxfp4RoundJob final : Job {
    Mxfp4RoundJob(const OperandRows& x, const Mxfp4Rows& to, int64_t rows, bool bytes)
        : x(x), to(to), rows(rows), bytes(bytes) {}

    int64_t chunks() const { return (rows + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, rows);
        for (int64_t row = chunk * CHUNK; row < last; row++)
            for (int64_t group = 0; group < to.inputs / 32; group++)
                round(x.at + row * x.step + 32 * group, to.from(row), group);
    }

  private:
    void round(const bf16* from, const Mxfp4Rows& row, int64_t group) const {
        const Float both[2] = {load(from), load(from + 16)};
        const Int magnitude = max(as_int(both[0]) & broadcast(MAGNITUDE), as_int(both[1]) & broadcast(MAGNITUDE));
        const int32_t exponent = reduce_max(to_float(shift_right(magnitude, 23)));
        // Groups that are smaller are zeros; those that are larger, or have infinity or NaN, are NaN.
        const bool none = exponent < LEAST, odd = exponent > MOST;
        const float unit = odd ? std::numeric_limits<float>::quiet_NaN() : none ? 0 : power(exponent - BITS);
        const Float units = broadcast(none || odd ? 0 : power(2 * 127 + BITS - exponent));  // in 1
        Int sum{};
        for (int half = 0; half < 2; half++) {
            const Int number = to_nearest_int(both[half] * units);
            const int64_t at = 32 * group + 16 * half;
            if (bytes) {
                const Int upper = shift_right(number + broadcast(0x8080), 8) - broadcast(0x80);
                store(row.planes(0) + at, upper);
                store(row.planes(0) + row.inputs + at, number - shift_left(upper, 8));
                sum = sum + number;
            } else
                store(row.numbers + at, to_float(number) * broadcast(unit));
        }
        if (!bytes) return;
        row.units[group] = unit;
        row.offsets[group] = -Float4Bytes::ZERO * int32_t(reduce_add(to_float(sum)));
    }

    // The power of two with this exponent of a float32 number.
    static float power(int32_t exponent) {
        const int32_t bits = exponent << 23;
        float found;
        memcpy(&found, &bits, sizeof found);
        return found;
    }

    static constexpr int32_t MAGNITUDE = 0x7fffffff, BITS = 13;
    // Exponents of float32 numbers. With scales from 2^-41 to 2^40, products are neither too large nor so small that AMX,
    // but not other instructions, makes them 0.
    static constexpr int32_t LEAST = 127 - 70, MOST = 127 + 75;
    static constexpr int64_t CHUNK = 8;  // rows of a chunk
    const OperandRows x;
    const Mxfp4Rows to;
    const int64_t rows;
    const bool bytes;
};

// Prefetch distance in bytes: here they are read faster than elsewhere.
constexpr int64_t FURTHER = 2560;

// The sums [M][32] of M rows times a panel. Not inlined, since it needs all registers.
template <int M>
__attribute__((noinline)) void mxfp4_dot_rows(const Mxfp4Rows& x, const uint8_t* scales, const uint8_t* codes,
    float* sums) {
    const Float4Bytes weights;
    const int64_t groups = x.inputs / 32;
    Float found[M][2] = {};
    for (int64_t group = 0; group < groups; group++, scales += PANEL, codes += 512) {
        for (int64_t line = 0; line < 512; line += CACHE_LINE) prefetch_l1(codes + FURTHER + line);
        const auto add_half = [&](auto half) TGI_INLINE_LAMBDA {
            Int upper[M], lower[M];
            for (int m = 0; m < M; m++) upper[m] = Int{}, lower[m] = broadcast(x.offsets[m * groups + group]);
#pragma GCC unroll 2
            for (int four = 0; four < 2; four++) {
                RowPairs high[M], low[M];
                for (int m = 0; m < M; m++) {
                    const int8_t* const planes = x.planes(m) + 32 * group + 16 * four;
                    high[m].set((const bf16*)planes), low[m].set((const bf16*)(planes + x.inputs));
                }
                const auto add_row = [&](auto j) TGI_INLINE_LAMBDA {
                    const Int row = weights.of<half>(load((const int32_t*)(codes + 64 * (4 * four + j))));
                    for (int m = 0; m < M; m++) {
                        upper[m] = dot_unsigned<j>(upper[m], high[m], row);
                        lower[m] = dot_unsigned<j>(lower[m], low[m], row);
                    }
                };
                add_row(std::integral_constant<int, 0>());
                add_row(std::integral_constant<int, 1>());
                add_row(std::integral_constant<int, 2>());
                add_row(std::integral_constant<int, 3>());
            }
            const Float scale = as_float(shift_left(load(scales + 16 * half), 23));
            for (int m = 0; m < M; m++) {
                const Float sum = to_float(shift_left(upper[m], 8) + lower[m]);
                found[m][half] = fma(sum, scale * broadcast(x.units[m * groups + group]), found[m][half]);
            }
        };
        add_half(std::integral_constant<int, 0>());
        add_half(std::integral_constant<int, 1>());
    }
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) store(sums + PANEL * m + 16 * half, found[m][half]);
}

// Whether so many rows are multiplied as bytes. AMX takes as long for 16 rows as the bytes of three to four.
constexpr int64_t MAX_MXFP4_DOT_ROWS = HAS_AMX ? 3 : REGISTERS == 1 ? 6 : 2;
inline bool multiplied_as_bytes(int64_t rows) { return !HAS_AMX || rows <= MAX_MXFP4_DOT_ROWS; }

struct Mxfp4LinearJob final : DotLinearJob<BfloatOperands<FormatKind::mxfp4>> {
    using Base = DotLinearJob<BfloatOperands<FormatKind::mxfp4>>;

    Mxfp4LinearJob(const LinearCall& call, const Mxfp4Rows& x, int64_t threads)
        : Base(call, {call, {x.numbers, x.inputs}}, threads), x(x) {}

    void compute(int64_t row, int64_t rows, int64_t first, int64_t last) const override {
        if (!multiplied_as_bytes(call.rows)) return Base::compute(row, rows, first, last);
        alignas(64) float sums[MAX_MXFP4_DOT_ROWS][PANEL];
        const int64_t header = w.form.header_bytes(w.inputs);
        for (int64_t number = first; number < last; number++)
            for (int64_t done = 0; done < rows; done += MAX_MXFP4_DOT_ROWS) {
                const int64_t count = std::min(MAX_MXFP4_DOT_ROWS, rows - done);
                with_row_count<MAX_MXFP4_DOT_ROWS>(count, [&](auto m) {
                    mxfp4_dot_rows<m>(x.from(row + done), w.panel(number), w.panel(number) + header, sums[0]);
                });
                apply_epilogue(call_of(number), row + done, count, first_output(number), FloatSums{sums[0]});
            }
    }

    const Mxfp4Rows x;
};

// Memory for the rows of a call, valid until the next call.
inline Mxfp4Rows mxfp4_rows(const LinearCall& call) {
    static thread_local std::vector<bf16> numbers;
    static thread_local std::vector<float> units;
    static thread_local std::vector<int32_t> offsets;
    const int64_t inputs = call.weight.inputs, all = call.rows * inputs;
    if ((int64_t)numbers.size() < all)
        numbers.resize(all), units.resize(all / 32), offsets.resize(all / 32);
    return {numbers.data(), units.data(), offsets.data(), inputs};
}

template <>
void linear_of<FormatKind::mxfp4>(ThreadPool& pool, const LinearCall& call) {
    const Mxfp4Rows x = mxfp4_rows(call);
    const Mxfp4RoundJob round(operand_rows(pool, call), x, call.rows, multiplied_as_bytes(call.rows));
    pool.run(round, round.chunks());
    const Mxfp4LinearJob job(call, x, pool.threads());
    pool.run(job, job.queue.threads());
}

// Rounds the rows of all groups.
struct Mxfp4RoundGroupsJob final : Job {
    void run(int64_t chunk, int64_t thread) const override {
        for (int64_t part = 0; part < jobs[chunk].chunks(); part++) jobs[chunk].run(part, thread);
    }

    std::deque<Mxfp4RoundJob> jobs;
};

template <>
void grouped_linear_of<FormatKind::mxfp4>(ThreadPool& pool, const LinearCall& call,
    const std::vector<WeightRows>& groups) {
    const Mxfp4Rows all = mxfp4_rows(call);
    const OperandRows x = operand_rows(pool, call);
    std::deque<LinearCall> parts;  // operands refer to them
    Mxfp4RoundGroupsJob round;
    GroupedLinearJob<Mxfp4LinearJob> products;
    for (const WeightRows& group : groups) {
        parts.push_back(group_call(call, group));
        round.jobs.emplace_back(x.from(group.first), all.from(group.first), group.rows, multiplied_as_bytes(group.rows));
        products.jobs.emplace_back(parts.back(), all.from(group.first), pool.threads());
    }
    pool.run(round, round.jobs.size());
    pool.run(products, pool.threads());
}

}  // namespace tgi
