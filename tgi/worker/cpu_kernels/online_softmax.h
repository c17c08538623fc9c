// The state of attention over a part of the positions, and the softmax that turns scores into weights of the values,
// with a running maximum (Milakov and Gimelshein, 2018).
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "vector_math.h"

namespace tgi {

#if TGI_DOT_ENGINE || defined(__AVX512F__)
constexpr int64_t TILE_ROWS = 32;  // rows of a tile
#else
constexpr int64_t TILE_ROWS = 36;  // a multiple of the rows that the FMA engine computes at once
#endif
constexpr int64_t PADDED_ROWS = (TILE_ROWS + LANES - 1) / LANES * LANES;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Attention of the rows of a tile over some positions. Scores are exponents of 2.
struct PartialAttention {
    float* values;  // [TILE_ROWS, dim] sum of 2^(score - highest) value
    float* sums;  // [TILE_ROWS, LANES] sums of 2^(score - highest), each of every 16th position
    float* highest;  // [PADDED_ROWS]

    static constexpr int64_t size(int64_t dim) { return TILE_ROWS * (dim + LANES) + PADDED_ROWS; }

    PartialAttention(float* at, int64_t dim) : values(at), sums(at + TILE_ROWS * dim),
        highest(at + TILE_ROWS * (dim + LANES)) {}

    void clear(int64_t rows, int64_t dim) const {
        memset(values, 0, rows * dim * sizeof(float));
        memset(sums, 0, rows * LANES * sizeof(float));
        std::fill(highest, highest + PADDED_ROWS, MINUS_INFINITY);
    }

    // Adds the attention over the positions that follow.
    void add(const PartialAttention& more, int64_t rows, int64_t dim) const {
        const Float never = broadcast(MINUS_INFINITY);
        for (int64_t first = 0; first < rows; first += LANES) {
            const Float before = load(highest + first), after = load(more.highest + first), top = max(before, after);
            // A row that has seen no position has a maximum of -infinity, which must not be subtracted.
            const Float from = select(top == never, zeros(), top);
            alignas(64) float a[LANES], b[LANES];
            store(a, exp2(before - from)), store(b, exp2(after - from));
            for (int64_t r = first; r < std::min(first + LANES, rows); r++) {
                if (more.highest[r] == MINUS_INFINITY) continue;
                add(values + r * dim, a[r - first], more.values + r * dim, b[r - first], dim);
                add(sums + r * LANES, a[r - first], more.sums + r * LANES, b[r - first], LANES);
            }
            store(highest + first, top);
        }
    }

    static void add(float* to, float a, const float* from, float b, int64_t size) {
        const Float as = broadcast(a), bs = broadcast(b);
        for (int64_t n = 0; n < size; n += LANES) store(to + n, fma(load(to + n), as, load(from + n) * bs));
    }
};

constexpr int64_t BLOCK = 64;  // positions that are computed together
constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, with a relative error below 7.5e-5, a fiftieth of the spacing of bfloat16. Shorter than `exp2`: a
// long prompt evaluates it billions of times.
class ApproximateExp2 {
  public:
    ApproximateExp2() {
#if defined(__AVX512F__)
        // Keeps the terms in registers; the compiler would load them from memory each time.
        for (Float& term : terms) asm("" : "+v"(term.part[0]));
#endif
    }

    TGI_INLINE Float operator()(Float x) const {
#if defined(__AVX512F__)
        const Float r{{_mm512_reduce_ps(x.part[0], _MM_FROUND_TO_NEG_INF)}};
        const Float p = fma(fma(fma(terms[3], r, terms[2]), r, terms[1]), r, terms[0]);
        return {{_mm512_scalef_ps(p.part[0], x.part[0])}};
#else
        // Adding 1.5 2^23 rounds x to an integer, which is then in the lowest bits.
        const Float shifted = x + broadcast(12582912.f), r = x - (shifted - broadcast(12582912.f));
        const Float p = fma(fma(fma(terms[3], r, terms[2]), r, terms[1]), r, terms[0]);
        const Float y = as_float(as_int(p) + shift_left(as_int(shifted), 23));
        return select(x > broadcast(-126.f), y, zeros());
#endif
    }

  private:
#if defined(__AVX512F__)
    // Of a fraction in [0, 1),
    Float terms[4] = {broadcast(0.999925219f), broadcast(0.695833533f), broadcast(0.226067178f),
                      broadcast(0.0780245071f)};
#else
    // or in [-0.5, 0.5].
    Float terms[4] = {broadcast(0.999928057f), broadcast(0.693260968f), broadcast(0.242611125f), broadcast(0.0551716685f)};
#endif
};

// `exp2` as a type.
struct ExactExp2 {
    TGI_INLINE Float operator()(Float x) const { return exp2(x); }
};

// Weights have no more precision than the products: those of bfloat16 numbers need less.
using WeightExp2 = std::conditional_t<std::is_same_v<Element, bf16>, ApproximateExp2, ExactExp2>;

// Operations on a row's scores of a block, [BLOCK].
struct Softmax {
    // Scores times this are exponents of 2.
    const float unit;

    // Multiplies the scores of the block's two pages with the scales of the keys.
    TGI_INLINE static void scale_scores(float* scores, const float* const (&scales)[2]) {
        for (int n = 0; n < BLOCK; n += LANES)
            store(scores + n, load(scores + n) * load(scales[n / (BLOCK / 2)] + n % (BLOCK / 2)));
    }

    // Masks the positions whose bits are not set.
    TGI_INLINE static void mask(float* scores, uint64_t visible) {
        const Float never = broadcast(MINUS_INFINITY);
        for (int n = 0; n < BLOCK; n += LANES)
            store(scores + n, select(mask_of(visible >> n & 0xffff), load(scores + n), never));
    }

    // cap tanh(scale score / cap).
    static void softcap_scores(float* scores, float scale, float cap) {
        const Float ratio = broadcast(scale / cap), caps = broadcast(cap);
        for (int n = 0; n < BLOCK; n += LANES) store(scores + n, caps * tanh(load(scores + n) * ratio));
    }

    // scale score + slope distance, where the first key is at `distance` from the query.
    static void bias_scores(float* scores, float scale, float slope, int64_t distance) {
        alignas(64) float lanes[LANES];
        for (int64_t n = 0; n < BLOCK; n += LANES) {
            for (int64_t i = 0; i < LANES; i++) lanes[i] = distance + n + i;
            store(scores + n, fma(load(scores + n), broadcast(scale), load(lanes) * broadcast(slope)));
        }
    }

    // The maximum of every 16th score.
    TGI_INLINE static Float lane_maxima(const float* scores) {
        const Float first = max(load(scores), load(scores + LANES));
        return max(first, max(load(scores + 2 * LANES), load(scores + 3 * LANES)));
    }

    // Turns scores into weights, and adds the weights to the sum of every 16th. `weights` may be the scores. `scales`:
    // the weights that are stored, but not those of the sums, are multiplied with the scales of the values of the two
    // pages; or null.
    template <bool scaled>
    void exponentiate(const float* scores, Operand* weights, float highest, float* sums, const WeightExp2& exp2,
        const float* const (&scales)[2]) const {
        // A row that has seen no position has only scores of -infinity, and weights of 0.
        const Float minus_highest = broadcast(highest == MINUS_INFINITY ? 0.f : -highest), units = broadcast(unit);
        Float sum = load(sums);
        for (int n = 0; n < BLOCK; n += 2 * LANES) {
            Float first = exp2(fma(load(scores + n), units, minus_highest));
            Float second = exp2(fma(load(scores + n + LANES), units, minus_highest));
            sum = sum + first + second;
            if (scaled) {
                const float* factors = scales[n / (BLOCK / 2)];
                first = first * load(factors), second = second * load(factors + LANES);
            }
            store(weights + n, first, second);
        }
        store(sums, sum);
    }
};

}  // namespace tgi
