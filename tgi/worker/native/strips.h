// Products of up to 8 rows without AMX, by dot products of vectors; and what kinds of numbers all products take.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace tgi {

// What is multiplied: pairs of bfloat16 with sums in float32, or four bytes in place of each pair, those of a without a
// sign and those of b with one, with sums in int32.
template <class Sum>
struct Kind;

template <>
struct Kind<float> {
    static __m512 none() { return _mm512_setzero_ps(); }
    static __m512 load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, __m512 sums) { _mm512_storeu_ps(at, sums); }
    static __m512 dot(__m512 sums, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

    // The same with three AMX tiles of these numbers.
    template <int c, int a, int b>
    static void tiles() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

template <>
struct Kind<int32_t> {
    static __m512i none() { return _mm512_setzero_si512(); }
    static __m512i load(const int32_t* at) { return _mm512_loadu_si512(at); }
    static void store(int32_t* at, __m512i sums) { _mm512_storeu_si512(at, sums); }
    static __m512i dot(__m512i sums, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sums, a, b); }

    template <int c, int a, int b>
    static void tiles() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

// The next 32 inputs of b, row by row: pairs of the first 16 columns and of the others.
template <class B>
struct Block {
    explicit Block(B& b) : at(b.block()), step(b.step), right(b.right) {}
    __m512i first(int row) const { return _mm512_loadu_si512(at + row * step); }
    __m512i second(int row) const { return _mm512_loadu_si512(at + row * step + right); }

    const bf16* at;
    const int64_t step, right;
};

// The sums of M rows and one block of columns, or of several that are gone through in turn: those of the next one stand 16
// rows behind.
template <bool add, int M, class Sum, class Meanwhile, class... B>
inline void strip(const bf16* a, int64_t a_step, int64_t depth, Sum* c, int64_t c_step, Meanwhile& meanwhile, B&... b) {
    using Of = Kind<Sum>;
    constexpr int N = sizeof...(b);
    decltype(Of::none()) sums[N][M][2];
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++)
                sums[n][m][half] = add ? Of::load(c + (16 * n + m) * c_step + 16 * half) : Of::none();
    for (int64_t k = 0; k < depth; k += 32) {
        const auto some = [&](const auto& block, auto& found) {
#pragma GCC unroll 16
            for (int row = 0; row < 16; row++) {
                const __m512i first = block.first(row), second = block.second(row);
                for (int m = 0; m < M; m++) {
                    int32_t pair;
                    memcpy(&pair, a + m * a_step + k + 2 * row, 4);
                    const __m512i both = _mm512_set1_epi32(pair);
                    found[m][0] = Of::dot(found[m][0], both, first);
                    found[m][1] = Of::dot(found[m][1], both, second);
                }
            }
        };
        int n = 0;
        (some(Block<B>(b), sums[n++]), ...);
        meanwhile();
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++) Of::store(c + (16 * n + m) * c_step + 16 * half, sums[n][m][half]);
}

constexpr int64_t STRIP = 8;  // rows that go through b together without AMX

// The sums of up to STRIP rows without AMX, or of half as many and two blocks of columns.
template <bool add = false, class Sum, class Meanwhile, class... B>
inline void strips(const bf16* a, int64_t a_step, int64_t rows, int64_t depth, Sum* c, int64_t c_step, Meanwhile&& meanwhile, B&... b) {
    if constexpr (sizeof...(b) == 1) {
        switch (rows) {
            case 8: return strip<add, 8>(a, a_step, depth, c, c_step, meanwhile, b...);
            case 7: return strip<add, 7>(a, a_step, depth, c, c_step, meanwhile, b...);
            case 6: return strip<add, 6>(a, a_step, depth, c, c_step, meanwhile, b...);
            case 5: return strip<add, 5>(a, a_step, depth, c, c_step, meanwhile, b...);
        }
    }
    switch (rows) {
        case 4: return strip<add, 4>(a, a_step, depth, c, c_step, meanwhile, b...);
        case 3: return strip<add, 3>(a, a_step, depth, c, c_step, meanwhile, b...);
        case 2: return strip<add, 2>(a, a_step, depth, c, c_step, meanwhile, b...);
        case 1: return strip<add, 1>(a, a_step, depth, c, c_step, meanwhile, b...);
    }
}

}  // namespace tgi
