// Activations as whole numbers, for weights that are whole numbers times a scale of each output: y = unit of the row *
// scale of the output * sum of products.
//
// The largest number of a row becomes 32767 units. Numbers of 16 bits are multiplied by their upper and their lower bytes
// apart, with sums that are exact: they do not depend on their order, and whatever computes them finds the same.
#pragma once
#include "linear.h"
#include "product.h"

namespace tgi {

// The numbers of all rows of a product, 32768 added so that none is negative: [2][rows][step] pairs of bytes, first the
// upper ones. What fills a row up may be anything: weights are 0 there.
struct Planes {
    Rows rows(int64_t row, int64_t count) const { return {at + row * step, step, count, count, apart}; }

    const bf16* at;
    const float* units;  // [rows]
    int64_t step, apart;
};

// Those of the rows of a call, until the next one.
Planes planes(Team& team, const LinearCall& call);

// Sums [rows][32] of products with upper and, `apart` behind them, with lower bytes. By what was added to the activations
// a sum is too large by 32768 times the sum of its output's numbers, which is taken off again.
struct PlaneSums {
    PlaneSums() = default;
    PlaneSums(const int32_t* at, int64_t apart, const float* units, const uint8_t* panel)
        : at(at), apart(apart), units(units), scales((const float*)panel), offsets((const int32_t*)panel + PANEL) {}

    __m512 of(int half) const {
        const __m512i upper = _mm512_add_epi32(_mm512_load_si512(at + 16 * half), _mm512_load_si512(offsets + 16 * half));
        const __m512 lower = _mm512_cvtepi32_ps(_mm512_load_si512(at + apart + 16 * half));
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper), _mm512_set1_ps(256.f), lower);
        return _mm512_mul_ps(_mm512_mul_ps(sum, _mm512_load_ps(scales + 16 * half)), _mm512_set1_ps(*units));
    }

    void next(int64_t rows) { at += rows * COLUMNS, units += rows; }

    const int32_t* at = nullptr;
    int64_t apart = 0;
    const float *units = nullptr, *scales = nullptr;
    const int32_t* offsets = nullptr;
};

}  // namespace tgi
