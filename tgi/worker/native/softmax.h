// The softmax between the two products of a tile: turns scores into shares of the values. See attention.cpp.
#pragma once
#include <algorithm>

#include "found.h"

namespace tgi {

constexpr int64_t BLOCK = 64;  // positions that are computed together
constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, off by less than 7.5e-5 of it, a fiftieth of a step of bfloat16. As `power`, but shorter: a long prompt
// has billions of them.
class ShortPower {
  public:
    ShortPower() {
        // In registers: the compiler would load them from memory for each.
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

// Of a row's scores in a block, [BLOCK].
struct Softmax {
    // Scores times this are powers of 2.
    const float unit;

    // Lets a row see only the positions whose bits are set.
    static void hide(float* scores, uint64_t sees) {
        const __m512 never = _mm512_set1_ps(NEVER);
        for (int n = 0; n < BLOCK; n += LANES)
            _mm512_store_ps(scores + n, _mm512_mask_mov_ps(never, sees >> n, _mm512_load_ps(scores + n)));
    }

    // cap tanh(scale score / cap).
    static void limit(float* scores, float scale, float cap) {
        const __m512 ratio = _mm512_set1_ps(scale / cap), most = _mm512_set1_ps(cap);
        for (int n = 0; n < BLOCK; n += LANES)
            _mm512_store_ps(scores + n, _mm512_mul_ps(most, tanh(_mm512_mul_ps(_mm512_load_ps(scores + n), ratio))));
    }

    // The largest among every 16th of them.
    static __m512 most(const float* scores) {
        const __m512 first = _mm512_max_ps(_mm512_load_ps(scores), _mm512_load_ps(scores + LANES));
        return _mm512_max_ps(first, _mm512_max_ps(_mm512_load_ps(scores + 2 * LANES), _mm512_load_ps(scores + 3 * LANES)));
    }

    // Turns them into shares, and adds these to the sum of every 16th.
    void weigh(const float* scores, bf16* shares, float highest, float* sums, const ShortPower& power) const {
        // Who has seen nothing yet has only scores of -infinity, and no share of anything.
        const __m512 less = _mm512_set1_ps(highest == NEVER ? 0.f : -highest), units = _mm512_set1_ps(unit);
        __m512 sum = _mm512_load_ps(sums);
        for (int n = 0; n < BLOCK; n += 2 * LANES) {
            const __m512 first = power(_mm512_fmadd_ps(_mm512_load_ps(scores + n), units, less));
            const __m512 second = power(_mm512_fmadd_ps(_mm512_load_ps(scores + n + LANES), units, less));
            sum = _mm512_add_ps(_mm512_add_ps(sum, first), second);
            store(shares + n, first, second);
        }
        _mm512_store_ps(sums, sum);
    }
};

}  // namespace tgi
