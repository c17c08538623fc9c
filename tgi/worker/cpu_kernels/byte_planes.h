// Activations as 16-bit integers on the dot engine, for integer weights with one scale for each output: y = unit of the row * scale of
// the output * sum of products.
//
// The largest magnitude of a row becomes 32767 units. The upper and the lower bytes of the 16-bit integers are
// multiplied separately, with exact int32 sums: results do not depend on the order of summation or on the instructions
// used.
#pragma once
#include "linear_job.h"

namespace tgi {

// The 16-bit integers of all rows, with an offset of 32768 that makes them unsigned, as two planes of bytes
// [2][rows][step] (in pairs of bytes): upper bytes first. Padding may be anything, since weights are 0 there.
struct BytePlanes {
    RowOperand rows(int64_t row, int64_t count) const { return {at + row * step, step, count, count, apart}; }

    const bf16* at;
    const float* units;  // [rows]
    int64_t step, apart;
};

// The byte planes of the rows x of a call, valid until the next call.
BytePlanes split_activations(ThreadPool& pool, const LinearCall& call, const OperandRows& x);

// The byte planes of each group of a call, valid until the next call.
std::vector<BytePlanes> split_groups(ThreadPool& pool, const LinearCall& call, const OperandRows& x,
    const std::vector<WeightRows>& groups);

// Reads the sums [rows][32] of products with upper bytes and, `apart` elements behind them, with lower bytes. The
// offset of the activations makes a sum too large by 32768 times the sum of the output's weights; `offsets` corrects
// that.
struct BytePlaneSums {
    BytePlaneSums() = default;
    BytePlaneSums(const int32_t* at, int64_t apart, const float* units, const uint8_t* panel)
        : at(at), apart(apart), units(units), scales((const float*)panel), offsets((const int32_t*)panel + PANEL) {}

    TGI_INLINE Float of(int half) const {
        const int n = LANES * half;
        const Float upper = to_float(load(at + n) + load(offsets + n)), lower = to_float(load(at + apart + n));
        return fma(upper, broadcast(256.f), lower) * load(scales + n) * broadcast(*units);
    }

    void next(int64_t rows) { at += rows * COLUMNS, units += rows; }

    const int32_t* at = nullptr;
    int64_t apart = 0;
    const float *units = nullptr, *scales = nullptr;
    const int32_t* offsets = nullptr;
};

}  // namespace tgi
