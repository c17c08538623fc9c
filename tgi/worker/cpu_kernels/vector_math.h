// Functions of vectors of 16 float32 numbers: exponentials, activations, and the maxima of several vectors.
#pragma once
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace tgi {

// The larger of two numbers; NaN where x is NaN.
TGI_INLINE Float at_least(float least, Float x) { return max(broadcast(least), x); }

// The smaller of two numbers; NaN where x is NaN.
TGI_INLINE Float at_most(float most, Float x) { return min(broadcast(most), x); }

// 2^x for x < 128, with a relative error below 3e-7: x is split into an integer and a fraction r in [0, 1), and 2^r is
// a polynomial. Without AVX-512, results below 2^-126 are 0.
TGI_INLINE Float exp2(Float x) {
#if defined(__AVX512F__)
    const Float r{{_mm512_reduce_ps(x.part[0], _MM_FROUND_TO_NEG_INF)}};
#else
    x = at_least(-127.f, x);
    const Float integer = floor(x), r = x - integer;
#endif
    Float p = broadcast(1.867131097e-03f);
    p = fma(p, r, broadcast(9.017027915e-03f));
    p = fma(p, r, broadcast(5.579991639e-02f));
    p = fma(p, r, broadcast(2.401644439e-01f));
    p = fma(p, r, broadcast(6.931512952e-01f));
    p = fma(p, r, broadcast(1.f));
#if defined(__AVX512F__)
    return {{_mm512_scalef_ps(p.part[0], x.part[0])}};
#else
    // The sum's lowest eight bits are the biased exponent.
    return p * as_float(shift_left(as_int(integer + broadcast(0x1p23f + 127.f)), 23));
#endif
}

// The largest element of each of 16 vectors, in their order.
inline Float horizontal_maxima(const Float (&x)[16]) {
#if defined(__AVX512F__)
    const auto both = [](__m512 a, __m512 b) {
        return _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    };
    const auto four = [&](const Float* of) {
        const __m512d a = (__m512d)both(of[0].part[0], of[1].part[0]), b = (__m512d)both(of[2].part[0], of[3].part[0]);
        return _mm512_max_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    };
    const auto eight = [&](const Float* of) {
        const __m512 a = four(of), b = four(of + 4);
        return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 a = eight(x), b = eight(x + 8);
    return {{_mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd))}};
#elif defined(__AVX2__)
    const auto both = [](const Float* of) {
        const __m256 a = max(of[0].part[0], of[0].part[1]), b = max(of[1].part[0], of[1].part[1]);
        return (__m256d)_mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    };
    const auto four = [&](const Float* of) {
        const __m256d a = both(of), b = both(of + 2);
        return _mm256_max_ps((__m256)_mm256_unpacklo_pd(a, b), (__m256)_mm256_unpackhi_pd(a, b));
    };
    Float found;
    for (int half = 0; half < 2; half++) {
        const __m256 a = four(x + 8 * half), b = four(x + 8 * half + 4);
        found.part[half] = _mm256_max_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    return found;
#else
    const auto lanes = [](const Float& of) { return max(max(of.part[0], of.part[1]), max(of.part[2], of.part[3])); };
    Float found;
    TGI_EACH_REGISTER {
        const Float* of = x + 4 * i;
        found.part[i] = vpmaxq_f32(vpmaxq_f32(lanes(of[0]), lanes(of[1])), vpmaxq_f32(lanes(of[2]), lanes(of[3])));
    }
    return found;
#endif
}

// 1 / x for 1 <= x < 2^127, with a relative error below 2^-22. With AVX-512 it is one step of Newton's method, in a
// fifth of the time of a division. Others divide: their estimates differ from one maker of processors to another.
TGI_INLINE Float reciprocal(Float x) {
#if defined(__AVX512F__)
    const Float near{{_mm512_rcp14_ps(x.part[0])}};
    return near * fnma(x, near, broadcast(2.f));
#else
    return broadcast(1.f) / x;
#endif
}

// 1 / (1 + e^-x) for x >= -87.3, where it is nearly 2^-126; relative error below 1e-6 for x > -10. NaN stays NaN.
TGI_INLINE Float sigmoid(Float x) { return reciprocal(broadcast(1.f) + exp2(x * broadcast(-1.44269504f))); }

TGI_INLINE Float tanh(Float x) {
    const Float two = broadcast(2.f);
    return fms(two, sigmoid(at_least(-87.3f, two * x)), broadcast(1.f));
}

// x sigmoid(x). Below -87.3 it is the value at -87.3, -1e-36. The bound applies to the factor x too: a huge x times the
// smallest sigmoid would not be small.
TGI_INLINE Float silu(Float x) {
    x = at_least(-87.3f, x);
    return x * sigmoid(x);
}

// x / 2, plus a x^2 above 0 and else b (exp(x) - 1 - x), where x counts as at most -1e-6 in the exponent.
TGI_INLINE Float xielu(Float x, float a, float b) {
    const Float power = exp2(at_most(-1e-6f, x) * broadcast(1.44269504f)) - broadcast(1.f);
    return fma(select(x > zeros(), x * x * broadcast(a), (power - x) * broadcast(b)), broadcast(1.f), x * broadcast(0.5f));
}

// g sigmoid(1.702 g) with g = min(x, 7).
TGI_INLINE Float clamped_silu(Float x) {
    return silu(at_most(7.f, x) * broadcast(1.702f)) * broadcast(1 / 1.702f);
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), computed with 1 + tanh(u) = 2 sigmoid(2 u). Below -9.99 it is the
// value at -9.99, -2e-37, where the argument of the sigmoid is -87.1.
TGI_INLINE Float gelu_tanh(Float x) {
    x = at_least(-9.99f, x);
    const Float inner = fma(x * x * x, broadcast(0.044715f), x);
    return x * sigmoid(inner * broadcast(1.59576912f));
}

// 0.5 x (1 + erf(x / sqrt(2))).
inline Float gelu(Float x) {
    alignas(64) float each[LANES];
    store(each, x);
    for (float& one : each) one = 0.5f * one * (1.f + std::erf(one * 0.70710678f));
    return load(each);
}

}  // namespace tgi
