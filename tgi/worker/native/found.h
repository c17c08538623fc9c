// What the rows of a tile find on their way over the keys.
#pragma once
#include <algorithm>
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
        for (int64_t first = 0; first < rows; first += LANES) {
            const int64_t last = std::min(first + LANES, rows);
            const __mmask16 these = (1u << (last - first)) - 1;
            const __m512 never = _mm512_set1_ps(NEVER);
            const __m512 before = _mm512_mask_load_ps(never, these, highest + first);
            const __m512 after = _mm512_mask_load_ps(never, these, more.highest + first);
            const __m512 top = _mm512_max_ps(before, after);
            // Who has seen nothing yet has no highest score to be fitted to.
            const __m512 from = _mm512_mask_mov_ps(top, _mm512_cmpeq_ps_mask(top, never), _mm512_setzero_ps());
            alignas(64) float a[LANES], b[LANES];
            _mm512_store_ps(a, power(_mm512_sub_ps(before, from)));
            _mm512_store_ps(b, power(_mm512_sub_ps(after, from)));
            for (int64_t r = first; r < last; r++) {
                if (more.highest[r] == NEVER) continue;
                add(values + r * dim, a[r - first], more.values + r * dim, b[r - first], dim);
                add(sums + r * LANES, a[r - first], more.sums + r * LANES, b[r - first], LANES);
            }
            _mm512_mask_store_ps(highest + first, these, top);
        }
    }

    static void add(float* to, float a, const float* from, float b, int64_t size) {
        const __m512 as = _mm512_set1_ps(a), bs = _mm512_set1_ps(b);
        for (int64_t n = 0; n < size; n += LANES) {
            const __m512 more = _mm512_mul_ps(_mm512_load_ps(from + n), bs);
            _mm512_store_ps(to + n, _mm512_fmadd_ps(_mm512_load_ps(to + n), as, more));
        }
    }
};

}  // namespace tgi
