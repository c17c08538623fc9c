// Types of stored numbers: bfloat16, float16 and float32, and which of them this library computes with.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tgi {

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

// The type of activations and of the KV cache. A library is compiled for one of them.
#if defined(TGI_ELEMENT_BF16)
using Element = bf16;
#elif defined(TGI_ELEMENT_F16)
using Element = f16;
#elif defined(TGI_ELEMENT_F32)
using Element = float;
#else
#error "define TGI_ELEMENT_BF16, TGI_ELEMENT_F16 or TGI_ELEMENT_F32"
#endif

// The engine of products: the dot engine (dot_tile.h) multiplies bfloat16 numbers, with instructions for them that AMX,
// AVX-512 and NEON have as extensions, the FMA engine (fma_tile.h) float32 numbers. `Operand` is the type of the rows
// that an engine multiplies.
#if !defined(TGI_ELEMENT_BF16)
#define TGI_DOT_ENGINE 0
#elif defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define TGI_DOT_ENGINE 1
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define TGI_DOT_ENGINE 1
#else
#define TGI_DOT_ENGINE 0
#endif

#if TGI_DOT_ENGINE
using Operand = bf16;
#else
using Operand = float;
#endif

// Whether products read pairs of numbers of this type: a dot product needs them, and widening a pair takes one
// instruction for each number.
template <class T>
constexpr bool IS_PAIRED = false;
template <>
inline constexpr bool IS_PAIRED<bf16> = true;

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

inline float to_float(f16 x) {
#if defined(__x86_64__)
    return _cvtsh_ss(x.bits);
#else
    __fp16 y;
    memcpy(&y, &x, 2);
    return y;
#endif
}

// Rounds to the nearest number of the type, ties to even.
template <class T>
T round_to(float x);

template <>
inline float round_to<float>(float x) {
    return x;
}

template <>
inline bf16 round_to<bf16>(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
inline f16 round_to<f16>(float x) {
#if defined(__x86_64__)
    return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
    const __fp16 y = x;
    f16 found;
    memcpy(&found, &y, 2);
    return found;
#endif
}

// The place of input k of column n in a matrix of `columns` columns, as products read it: bfloat16 with the inputs 2 j
// and 2 j + 1 of a column next to each other, other types row by row.
template <class T>
constexpr int64_t element_index(int64_t k, int64_t n, int64_t columns) {
    if (IS_PAIRED<T>) return k / 2 * 2 * columns + 2 * n + k % 2;
    return k * columns + n;
}

}  // namespace tgi
