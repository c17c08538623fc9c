// The state of attention over a part of the positions, and the softmax that turns scores into weights of the values,
// with a running maximum (Milakov and Gimelshein, 2018).
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "vector_math.h"

namespace tgi {

constexpr int64_t TILE_ROWS = 32;  // rows of a tile
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Attention of the rows of a tile over some positions. Scores are exponents of 2.
struct PartialAttention {
    float* values;  // [TILE_ROWS, head_dim] sum of 2^(score - highest) value
    float* highest;  // [TILE_ROWS]
    float* sums;  // [TILE_ROWS, LANES] sums of 2^(score - highest), each of every 16th position

    static constexpr int64_t size(int64_t dim) { return TILE_ROWS * (dim + LANES + 1); }

    PartialAttention(float* at, int64_t dim) : values(at), highest(at + TILE_ROWS * (dim + LANES)),
        sums(at + TILE_ROWS * dim) {}

    void clear(int64_t rows, int64_t dim) const {
        memset(values, 0, rows * dim * sizeof(float));
        std::fill(highest, highest + rows, MINUS_INFINITY);
        memset(sums, 0, rows * LANES * sizeof(float));
    }

    // Adds the attention over the positions that follow.
    void add(const PartialAttention& more, int64_t rows, int64_t dim) const {
        for (int64_t first = 0; first < rows; first += LANES) {
            const int64_t last = std::min(first + LANES, rows);
            const __mmask16 these = (1u << (last - first)) - 1;
            const __m512 never = _mm512_set1_ps(MINUS_INFINITY);
            const __m512 before = _mm512_mask_load_ps(never, these, highest + first);
            const __m512 after = _mm512_mask_load_ps(never, these, more.highest + first);
            const __m512 top = _mm512_max_ps(before, after);
            // A row that has seen no position has a maximum of -infinity, which must not be subtracted.
            const __m512 from = _mm512_mask_mov_ps(top, _mm512_cmpeq_ps_mask(top, never), _mm512_setzero_ps());
            alignas(64) float a[LANES], b[LANES];
            _mm512_store_ps(a, exp2(_mm512_sub_ps(before, from)));
            _mm512_store_ps(b, exp2(_mm512_sub_ps(after, from)));
            for (int64_t r = first; r < last; r++) {
                if (more.highest[r] == MINUS_INFINITY) continue;
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

constexpr int64_t BLOCK = 64;  // positions that are computed together
constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, with a relative error below 7.5e-5, a fiftieth of the spacing of bfloat16. Shorter than `exp2`: a
// long prompt evaluates it billions of times.
class ApproximateExp2 {
  public:
    ApproximateExp2() {
        // Keeps the terms in registers; the compiler would load them from memory each time.
        for (__m512& term : terms) asm("" : "+v"(term));
    }

    __m512 operator()(__m512 x) const {
        const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
        __m512 p = _mm512_fmadd_ps(terms[3], r, terms[2]);
        p = _mm512_fmadd_ps(p, r, terms[1]);
        p = _mm512_fmadd_ps(p, r, terms[0]);
        return _mm512_scalef_ps(p, x);
    }

  private:
    __m512 terms[4] = {_mm512_set1_ps(0.999925219f), _mm512_set1_ps(0.695833533f), _mm512_set1_ps(0.226067178f),
                       _mm512_set1_ps(0.0780245071f)};
};

// Operations on a row's scores of a block, [BLOCK].
struct Softmax {
    // Scores times this are exponents of 2.
    const float unit;

    // Masks the positions whose bits are not set.
    static void mask(float* scores, uint64_t visible) {
        const __m512 never = _mm512_set1_ps(MINUS_INFINITY);
        for (int n = 0; n < BLOCK; n += LANES)
            _mm512_store_ps(scores + n, _mm512_mask_mov_ps(never, visible >> n, _mm512_load_ps(scores + n)));
    }

    // cap tanh(scale score / cap).
    static void softcap_scores(float* scores, float scale, float cap) {
        const __m512 ratio = _mm512_set1_ps(scale / cap), caps = _mm512_set1_ps(cap);
        for (int n = 0; n < BLOCK; n += LANES)
            _mm512_store_ps(scores + n, _mm512_mul_ps(caps, tanh(_mm512_mul_ps(_mm512_load_ps(scores + n), ratio))));
    }

    // The maximum of every 16th score.
    static __m512 lane_maxima(const float* scores) {
        const __m512 first = _mm512_max_ps(_mm512_load_ps(scores), _mm512_load_ps(scores + LANES));
        return _mm512_max_ps(first, _mm512_max_ps(_mm512_load_ps(scores + 2 * LANES),
            _mm512_load_ps(scores + 3 * LANES)));
    }

    // Turns scores into weights, and adds the weights to the sum of every 16th.
    void exponentiate(const float* scores, bf16* weights, float highest, float* sums,
        const ApproximateExp2& exp2) const {
        // A row that has seen no position has only scores of -infinity, and weights of 0.
        const __m512 minus_highest = _mm512_set1_ps(highest == MINUS_INFINITY ? 0.f : -highest),
            units = _mm512_set1_ps(unit);
        __m512 sum = _mm512_load_ps(sums);
        for (int n = 0; n < BLOCK; n += 2 * LANES) {
            const __m512 first = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + n), units, minus_highest));
            const __m512 second = exp2(_mm512_fmadd_ps(_mm512_load_ps(scores + n + LANES), units, minus_highest));
            sum = _mm512_add_ps(_mm512_add_ps(sum, first), second);
            store(weights + n, first, second);
        }
        _mm512_store_ps(sums, sum);
    }
};

}  // namespace tgi
