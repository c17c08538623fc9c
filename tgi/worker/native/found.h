// What the rows of a tile find on their way over the keys.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace tgi {

constexpr int64_t TILE = 32;   // rows
constexpr int64_t LANES = 16;  // numbers of a vector
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// In some of the positions. Scores are powers of 2.
struct Found {
    float* values;   // [TILE, head_dim] sum of 2^(score - highest) value
    float* highest;  // [TILE]
    float* sums;     // [TILE, LANES] of 2^(score - highest), of every 16th position

    static constexpr int64_t size(int64_t dim) { return TILE * (dim + LANES + 1); }

    Found(float* at, int64_t dim) : values(at), highest(at + TILE * (dim + LANES)), sums(at + TILE * dim) {}

    void clear(int64_t rows, int64_t dim) const {
        memset(values, 0, rows * dim * sizeof(float));
        std::fill(highest, highest + rows, NEVER);
        memset(sums, 0, rows * LANES * sizeof(float));
    }

    // Adds what they have found in the positions that follow.
    void add(const Found& more, int64_t rows, int64_t dim) const {
        for (int64_t r = 0; r < rows; r++) {
            if (more.highest[r] == NEVER) continue;
            const float top = std::max(highest[r], more.highest[r]);
            const __m512 a = _mm512_set1_ps(std::exp2(highest[r] - top));
            const __m512 b = _mm512_set1_ps(std::exp2(more.highest[r] - top));
            for (int64_t d = r * dim; d < (r + 1) * dim; d += LANES) add(values + d, a, more.values + d, b);
            add(sums + r * LANES, a, more.sums + r * LANES, b);
            highest[r] = top;
        }
    }

    static void add(float* to, __m512 a, const float* from, __m512 b) {
        const __m512 more = _mm512_mul_ps(_mm512_load_ps(from), b);
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), a, more));
    }
};

}  // namespace tgi
