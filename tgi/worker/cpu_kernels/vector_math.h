// Vectors of 16 float32 numbers, loaded from and stored to bfloat16.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>

namespace tgi {

using bf16 = uint16_t;

inline __m512 load(const bf16* at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}

// Rounds to nearest, ties to even.
inline void store(bf16* at, __m512 x) { _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x)); }

inline void store(bf16* at, __m512 first, __m512 second) {
    _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// 2^x for x < 128, with a relative error below 3e-7: x is split into an integer and a fraction r in [0, 1), and 2^r is
// a polynomial.
inline __m512 exp2(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(1.867131097e-03f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017027915e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579991639e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401644439e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931512952e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, x);
}

// The largest element of each of 16 vectors, in their order.
inline __m512 horizontal_maxima(const __m512 (&x)[16]) {
    const auto both = [](__m512 a, __m512 b) { return _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a,
        b)); };
    const auto four = [&](const __m512* of) {
        const __m512d a = (__m512d)both(of[0], of[1]), b = (__m512d)both(of[2], of[3]);
        return _mm512_max_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    };
    const auto eight = [&](const __m512* of) {
        const __m512 a = four(of), b = four(of + 4);
        return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 a = eight(x), b = eight(x + 8);
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// 1 / x for 1 <= x < 2^127, with a relative error below 2^-22: one step of Newton's method, in a fifth of the time of a
// division.
inline __m512 reciprocal(__m512 x) {
    const __m512 near = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(near, _mm512_fnmadd_ps(x, near, _mm512_set1_ps(2.f)));
}

// The larger of two numbers; NaN where x is NaN.
inline __m512 at_least(float least, __m512 x) { return _mm512_max_ps(_mm512_set1_ps(least), x); }

// 1 / (1 + e^-x) for x >= -87.3, where it is nearly 2^-126; relative error below 1e-6 for x > -10. NaN stays NaN.
inline __m512 sigmoid(__m512 x) {
    return reciprocal(_mm512_add_ps(_mm512_set1_ps(1.f), exp2(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)))));
}

inline __m512 tanh(__m512 x) {
    const __m512 two = _mm512_set1_ps(2.f);
    return _mm512_fmsub_ps(two, sigmoid(at_least(-87.3f, _mm512_mul_ps(two, x))), _mm512_set1_ps(1.f));
}

// x sigmoid(x). Below -87.3 it is the value at -87.3, -1e-36. The bound applies to the factor x too: a huge x times the
// smallest sigmoid would not be small.
inline __m512 silu(__m512 x) {
    x = at_least(-87.3f, x);
    return _mm512_mul_ps(x, sigmoid(x));
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), computed with 1 + tanh(u) = 2 sigmoid(2 u). Below -9.99 it is the
// value at -9.99, -2e-37, where the argument of the sigmoid is -87.1.
inline __m512 gelu_tanh(__m512 x) {
    x = at_least(-9.99f, x);
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(inner, _mm512_set1_ps(1.59576912f))));
}

// 0.5 x (1 + erf(x / sqrt(2))).
inline __m512 gelu(__m512 x) {
    alignas(64) float each[16];
    _mm512_store_ps(each, x);
    for (float& one : each) one = 0.5f * one * (1.f + std::erf(one * 0.70710678f));
    return _mm512_load_ps(each);
}

}  // namespace tgi
