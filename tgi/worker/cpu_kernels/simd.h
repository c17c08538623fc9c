// Vectors of 16 float32 or int32 numbers on every instruction set: one register of 512 bits, two of 256, or four of 128.
//
// Written with the vector extensions of GCC and clang; intrinsics stand where an instruction has no portable form.
// Reductions add in the same order on every instruction set.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace tgi {

constexpr int64_t LANES = 16;  // numbers of a vector

#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8;
#elif defined(__ARM_NEON)
constexpr int REGISTER_LANES = 4;
#else
#error "AVX2, AVX-512 or NEON is needed"
#endif
constexpr int REGISTERS = LANES / REGISTER_LANES;  // of a vector

typedef float FloatRegister __attribute__((vector_size(4 * REGISTER_LANES), aligned(4 * REGISTER_LANES)));
typedef int32_t IntRegister __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint32_t WordRegister __attribute__((vector_size(4 * REGISTER_LANES)));
typedef int8_t SignedByteRegister __attribute__((vector_size(REGISTER_LANES)));

// Compilers stop inlining in large functions, where a call would pass vectors through memory.
#define TGI_INLINE inline __attribute__((always_inline))

#define TGI_INLINE_LAMBDA __attribute__((always_inline))

#define TGI_EACH_REGISTER _Pragma("GCC unroll 4") for (int i = 0; i < REGISTERS; i++)

struct Float {
    FloatRegister part[REGISTERS];
};

struct Int {
    IntRegister part[REGISTERS];
};

// --- construction and bits -------------------------------------------------------------------------------------------

TGI_INLINE Float broadcast(float x) {
    Float y;
    TGI_EACH_REGISTER {
#if defined(__AVX512F__)
        y.part[i] = _mm512_set1_ps(x);
#elif defined(__AVX2__)
        y.part[i] = _mm256_set1_ps(x);
#else
        y.part[i] = vdupq_n_f32(x);
#endif
    }
    return y;
}

TGI_INLINE Int broadcast(int32_t x) {
    Int y;
    TGI_EACH_REGISTER y.part[i] = IntRegister{} + x;
    return y;
}

TGI_INLINE Float zeros() { return Float{}; }

TGI_INLINE Int as_int(Float x) {
    Int y;
    TGI_EACH_REGISTER y.part[i] = (IntRegister)x.part[i];
    return y;
}

TGI_INLINE Float as_float(Int x) {
    Float y;
    TGI_EACH_REGISTER y.part[i] = (FloatRegister)x.part[i];
    return y;
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

#define TGI_OPERATOR(Type, symbol)                                    \
    TGI_INLINE Type operator symbol(Type a, Type b) {                     \
        TGI_EACH_REGISTER a.part[i] = a.part[i] symbol b.part[i];     \
        return a;                                                     \
    }
TGI_OPERATOR(Float, +)
TGI_OPERATOR(Float, -)
TGI_OPERATOR(Float, *)
TGI_OPERATOR(Float, /)
TGI_OPERATOR(Int, +)
TGI_OPERATOR(Int, -)
TGI_OPERATOR(Int, *)
TGI_OPERATOR(Int, &)
TGI_OPERATOR(Int, |)
TGI_OPERATOR(Int, ^)
#undef TGI_OPERATOR

TGI_INLINE Int shift_left(Int x, int bits) {
    TGI_EACH_REGISTER x.part[i] = x.part[i] << bits;
    return x;
}

// Fills with zeros.
TGI_INLINE Int shift_right(Int x, int bits) {
    TGI_EACH_REGISTER x.part[i] = (IntRegister)((WordRegister)x.part[i] >> bits);
    return x;
}

TGI_INLINE FloatRegister fma(FloatRegister a, FloatRegister b, FloatRegister c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return vfmaq_f32(c, a, b);
#endif
}

// a b + c, rounded once.
TGI_INLINE Float fma(Float a, Float b, Float c) {
    TGI_EACH_REGISTER a.part[i] = fma(a.part[i], b.part[i], c.part[i]);
    return a;
}

// a b - c, rounded once.
TGI_INLINE Float fms(Float a, Float b, Float c) {
    TGI_EACH_REGISTER a.part[i] = fma(a.part[i], b.part[i], -c.part[i]);
    return a;
}

// c - a b, rounded once.
TGI_INLINE Float fnma(Float a, Float b, Float c) {
    TGI_EACH_REGISTER a.part[i] = fma(-a.part[i], b.part[i], c.part[i]);
    return a;
}

TGI_INLINE FloatRegister max(FloatRegister a, FloatRegister b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return vbslq_f32(vcgtq_f32(a, b), a, b);
#endif
}

TGI_INLINE FloatRegister min(FloatRegister a, FloatRegister b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return vbslq_f32(vcltq_f32(a, b), a, b);
#endif
}

// The larger number; b if one is NaN.
TGI_INLINE Float max(Float a, Float b) {
    TGI_EACH_REGISTER a.part[i] = max(a.part[i], b.part[i]);
    return a;
}

// The smaller number; b if one is NaN.
TGI_INLINE Float min(Float a, Float b) {
    TGI_EACH_REGISTER a.part[i] = min(a.part[i], b.part[i]);
    return a;
}

TGI_INLINE Int max(Int a, Int b) {
    TGI_EACH_REGISTER {
#if defined(__AVX512F__)
        a.part[i] = (IntRegister)_mm512_max_epi32((__m512i)a.part[i], (__m512i)b.part[i]);
#elif defined(__AVX2__)
        a.part[i] = (IntRegister)_mm256_max_epi32((__m256i)a.part[i], (__m256i)b.part[i]);
#else
        a.part[i] = vmaxq_s32(a.part[i], b.part[i]);
#endif
    }
    return a;
}

// Rounds down to an integer.
TGI_INLINE Float floor(Float x) {
    TGI_EACH_REGISTER {
#if defined(__AVX512F__)
        x.part[i] = _mm512_roundscale_ps(x.part[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
        x.part[i] = _mm256_floor_ps(x.part[i]);
#else
        x.part[i] = vrndmq_f32(x.part[i]);
#endif
    }
    return x;
}

// Rounds to the nearest integer, ties to even.
TGI_INLINE Float round_to_even(Float x) {
    TGI_EACH_REGISTER {
#if defined(__AVX512F__)
        x.part[i] = _mm512_roundscale_ps(x.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
        x.part[i] = _mm256_round_ps(x.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
        x.part[i] = vrndnq_f32(x.part[i]);
#endif
    }
    return x;
}

// Integers as float32 numbers.
TGI_INLINE Float to_float(Int x) {
    Float y;
    TGI_EACH_REGISTER y.part[i] = __builtin_convertvector(x.part[i], FloatRegister);
    return y;
}

// Numbers that are integers, as int32.
TGI_INLINE Int to_int(Float x) {
    Int y;
    TGI_EACH_REGISTER y.part[i] = __builtin_convertvector(x.part[i], IntRegister);
    return y;
}

// The nearest integers, ties to even, as int32.
TGI_INLINE Int to_nearest_int(Float x) {
    Int y;
    TGI_EACH_REGISTER {
#if defined(__AVX512F__)
        y.part[i] = (IntRegister)_mm512_cvtps_epi32(x.part[i]);
#elif defined(__AVX2__)
        y.part[i] = (IntRegister)_mm256_cvtps_epi32(x.part[i]);
#else
        y.part[i] = vcvtnq_s32_f32(x.part[i]);
#endif
    }
    return y;
}

// --- masks -----------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

struct Mask {
    __mmask16 bits;
};

TGI_INLINE Mask operator>(Float a, Float b) { return {_mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_GT_OQ)}; }
TGI_INLINE Mask operator==(Float a, Float b) { return {_mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_EQ_OQ)}; }

// a where the mask is set, else b.
TGI_INLINE Float select(Mask mask, Float a, Float b) { return {{_mm512_mask_mov_ps(b.part[0], mask.bits, a.part[0])}}; }
TGI_INLINE Int select(Mask mask, Int a, Int b) {
    return {{(IntRegister)_mm512_mask_mov_epi32((__m512i)b.part[0], mask.bits, (__m512i)a.part[0])}};
}

// The mask of lanes whose bits are set, and the reverse.
TGI_INLINE Mask mask_of(uint32_t bits) { return {(__mmask16)bits}; }
TGI_INLINE uint32_t bits_of(Mask mask) { return mask.bits; }

#else

struct Mask {
    IntRegister part[REGISTERS];  // -1 or 0
};

TGI_INLINE Mask operator>(Float a, Float b) {
    Mask found;
    TGI_EACH_REGISTER found.part[i] = a.part[i] > b.part[i];
    return found;
}

TGI_INLINE Mask operator==(Float a, Float b) {
    Mask found;
    TGI_EACH_REGISTER found.part[i] = a.part[i] == b.part[i];
    return found;
}

// a where the mask is set, else b.
TGI_INLINE Int select(Mask mask, Int a, Int b) {
    TGI_EACH_REGISTER a.part[i] = (a.part[i] & mask.part[i]) | (b.part[i] & ~mask.part[i]);
    return a;
}

TGI_INLINE Float select(Mask mask, Float a, Float b) { return as_float(select(mask, as_int(a), as_int(b))); }

// The mask of lanes whose bits are set.
TGI_INLINE Mask mask_of(uint32_t bits) {
    alignas(64) static constexpr int32_t LANE_BITS[LANES] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,
                                                             1 << 6, 1 << 7, 1 << 8,  1 << 9,  1 << 10, 1 << 11,
                                                             1 << 12, 1 << 13, 1 << 14, 1 << 15};
    Mask found;
    TGI_EACH_REGISTER {
        IntRegister lanes;
        memcpy(&lanes, LANE_BITS + i * REGISTER_LANES, sizeof lanes);
        found.part[i] = (lanes & (int32_t)bits) != 0;
    }
    return found;
}

// The bits of the lanes that are set.
TGI_INLINE uint32_t bits_of(Mask mask) {
    uint32_t bits = 0;
    TGI_EACH_REGISTER {
#if defined(__AVX2__)
        bits |= uint32_t(_mm256_movemask_ps((__m256)mask.part[i])) << i * REGISTER_LANES;
#else
        static constexpr int32_t BITS[4] = {1, 2, 4, 8};
        bits |= vaddvq_u32(vreinterpretq_u32_s32(vandq_s32((int32x4_t)mask.part[i], vld1q_s32(BITS)))) << 4 * i;
#endif
    }
    return bits;
}

#endif

// The mask of the first `count` lanes; all if there are more.
TGI_INLINE Mask first_lanes(int64_t count) { return mask_of(count >= LANES ? 0xffff : (1u << count) - 1); }

// --- memory ----------------------------------------------------------------------------------------------------------

template <class Register, class T>
TGI_INLINE Register load_register(const T* at) {
    Register found;
    memcpy(&found, at, sizeof found);
    return found;
}

// The numbers of a register from any address, widened to 32 bits. With intrinsics, since compilers turn conversions of
// vectors of different sizes into many instructions.
TGI_INLINE IntRegister widen(const uint16_t* at) {
#if defined(__AVX512F__)
    return (IntRegister)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__AVX2__)
    return (IntRegister)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
#else
    return (IntRegister)vmovl_u16(vld1_u16(at));
#endif
}

// Sixteen numbers from any address.
TGI_INLINE Float load(const float* at) {
    Float x;
    TGI_EACH_REGISTER x.part[i] = load_register<FloatRegister>(at + i * REGISTER_LANES);
    return x;
}

TGI_INLINE Float load(const bf16* at) {
    Float x;
    TGI_EACH_REGISTER x.part[i] = (FloatRegister)(widen(&at->bits + i * REGISTER_LANES) << 16);
    return x;
}

TGI_INLINE Float load(const f16* at) {
    Float x;
    TGI_EACH_REGISTER {
#if defined(__AVX512F__)
        x.part[i] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__AVX2__)
        x.part[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 8 * i)));
#else
        x.part[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&at[4 * i].bits)));
#endif
    }
    return x;
}

TGI_INLINE Int load(const int32_t* at) {
    Int x;
    TGI_EACH_REGISTER x.part[i] = load_register<IntRegister>(at + i * REGISTER_LANES);
    return x;
}

// Sixteen bytes, widened.
TGI_INLINE Int load(const int8_t* at) {
    Int x;
#if defined(__AVX512F__)
    x.part[0] = (IntRegister)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif defined(__AVX2__)
    TGI_EACH_REGISTER x.part[i] = (IntRegister)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8 * i)));
#else
    const int8x16_t bytes = vld1q_s8(at);
    const int16x8_t halves[] = {vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)};
    TGI_EACH_REGISTER x.part[i] = i % 2 ? vmovl_high_s16(halves[i / 2]) : vmovl_s16(vget_low_s16(halves[i / 2]));
#endif
    return x;
}

TGI_INLINE Int load(const uint8_t* at) {
    Int x;
#if defined(__AVX512F__)
    x.part[0] = (IntRegister)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
#elif defined(__AVX2__)
    TGI_EACH_REGISTER x.part[i] = (IntRegister)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8 * i)));
#else
    const uint8x16_t bytes = vld1q_u8(at);
    const uint16x8_t halves[] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
    TGI_EACH_REGISTER x.part[i] =
        (IntRegister)(i % 2 ? vmovl_high_u16(halves[i / 2]) : vmovl_u16(vget_low_u16(halves[i / 2])));
#endif
    return x;
}

TGI_INLINE void store(float* at, Float x) {
    TGI_EACH_REGISTER memcpy(at + i * REGISTER_LANES, &x.part[i], sizeof x.part[i]);
}

TGI_INLINE void store(int32_t* at, Int x) {
    TGI_EACH_REGISTER memcpy(at + i * REGISTER_LANES, &x.part[i], sizeof x.part[i]);
}

// Stores the lower 16 bits of the numbers, whose upper bits are 0.
TGI_INLINE void narrow(void* at, WordRegister x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0xd8);
    _mm_storeu_si128((__m128i*)at, _mm256_castsi256_si128(packed));
#else
    vst1_u16((uint16_t*)at, vmovn_u32((uint32x4_t)x));
#endif
}

// The lower bytes.
TGI_INLINE void store(int8_t* at, Int x) {
    TGI_EACH_REGISTER {
        const auto bytes = __builtin_convertvector(x.part[i], SignedByteRegister);
        memcpy(at + i * REGISTER_LANES, &bytes, sizeof bytes);
    }
}

// Rounds to nearest, ties to even.
TGI_INLINE void store(bf16* at, Float x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    for (int i = 0; i < REGISTERS; i += 2) {
        const bfloat16x8_t eight = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.part[i]), x.part[i + 1]);
        vst1q_bf16((bfloat16_t*)at + i * REGISTER_LANES, eight);
    }
#else
    TGI_EACH_REGISTER {
#if defined(__AVX512BF16__)
        _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x.part[i]));
#else
        const auto bits = (WordRegister)x.part[i];
        const WordRegister rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
        const auto is_number = (WordRegister)(x.part[i] == x.part[i]);
        narrow(at + i * REGISTER_LANES, (rounded & is_number) | (nan & ~is_number));
#endif
    }
#endif
}

TGI_INLINE void store(f16* at, Float x) {
    TGI_EACH_REGISTER {
#if defined(__AVX512F__)
        _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph(x.part[i], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
        _mm_storeu_si128((__m128i*)(at + 8 * i), _mm256_cvtps_ph(x.part[i], _MM_FROUND_TO_NEAREST_INT));
#else
        vst1_u16(&at[4 * i].bits, vreinterpret_u16_f16(vcvt_f16_f32(x.part[i])));
#endif
    }
}

// Two vectors that follow each other.
template <class T>
TGI_INLINE void store(T* at, Float first, Float second) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
        _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh(second.part[0], first.part[0]));
        return;
    }
#endif
    store(at, first), store(at + LANES, second);
}

// The first `count` numbers, 0 to 16; the others are 0, and their memory is not read.
template <class T>
TGI_INLINE auto load_first(const T* at, int64_t count) {
    if (count >= LANES) return load(at);
    alignas(64) T all[LANES] = {};
    memcpy(all, at, count * sizeof(T));
    return load(all);
}

#if defined(__AVX512F__)
TGI_INLINE Float load_first(const float* at, int64_t count) {
    return {{_mm512_maskz_loadu_ps(first_lanes(count).bits, at)}};
}

TGI_INLINE Float load_first(const bf16* at, int64_t count) {
    const __m256i halves = _mm256_maskz_loadu_epi16(first_lanes(count).bits, at);
    return {{(FloatRegister)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)}};
}
#endif

// Stores the first `count` numbers, 0 to 16.
template <class T>
TGI_INLINE void store_first(T* at, Float x, int64_t count) {
    if (count >= LANES) return store(at, x);
    alignas(64) T all[LANES];
    store(all, x);
    memcpy(at, all, count * sizeof(T));
}

#if defined(__AVX512F__)
TGI_INLINE void store_first(float* at, Float x, int64_t count) {
    _mm512_mask_storeu_ps(at, first_lanes(count).bits, x.part[0]);
}
#endif

#if defined(__AVX512BF16__)
TGI_INLINE void store_first(bf16* at, Float x, int64_t count) {
    _mm256_mask_storeu_epi16(at, first_lanes(count).bits, (__m256i)_mm512_cvtneps_pbh(x.part[0]));
}
#endif

// --- transposition ---------------------------------------------------------------------------------------------------

// The lanes of two vectors in turn: lane i of a, then lane i of b.
TGI_INLINE void interleave(Float& a, Float& b) {
    const Float x = a, y = b;
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    a.part[0] = _mm512_permutex2var_ps(x.part[0], low, y.part[0]);
    b.part[0] = _mm512_permutex2var_ps(x.part[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), y.part[0]);
#elif defined(__AVX2__)
    const auto both = [](__m256 one, __m256 other, Float& to) {
        const __m256 low = _mm256_unpacklo_ps(one, other), high = _mm256_unpackhi_ps(one, other);
        to.part[0] = _mm256_permute2f128_ps(low, high, 0x20), to.part[1] = _mm256_permute2f128_ps(low, high, 0x31);
    };
    both(x.part[0], y.part[0], a), both(x.part[1], y.part[1], b);
#else
    for (int i = 0; i < 2; i++) {
        a.part[2 * i] = vzip1q_f32(x.part[i], y.part[i]), a.part[2 * i + 1] = vzip2q_f32(x.part[i], y.part[i]);
        b.part[2 * i] = vzip1q_f32(x.part[i + 2], y.part[i + 2]);
        b.part[2 * i + 1] = vzip2q_f32(x.part[i + 2], y.part[i + 2]);
    }
#endif
}

// Lane j of vector i goes to lane i of vector j. Each round turns the number of an element, of which the upper half of
// the bits is its vector's, by one bit.
TGI_INLINE void transpose(Float (&x)[LANES]) {
    for (int round = 0; round < 4; round++) {
        Float next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = x[i], next[2 * i + 1] = x[i + LANES / 2];
            interleave(next[2 * i], next[2 * i + 1]);
        }
        std::copy_n(next, LANES, x);
    }
}

// --- columns of products ---------------------------------------------------------------------------------------------

// Input 2 j (which = 0) or 2 j + 1 of 16 columns, from the first number of the pair. `apart`: elements from one input to
// the next, of types that are not paired.
template <int which>
TGI_INLINE Float load_input(const bf16* at, int64_t) {
    const Int words = load((const int32_t*)at);
    return as_float(which ? words & broadcast(int32_t(0xffff0000)) : shift_left(words, 16));
}

template <int which, class T>
TGI_INLINE Float load_input(const T* at, int64_t apart) {
    return load(at + which * apart);
}

template <int which>
TGI_INLINE Float load_input(const int8_t* at, int64_t apart) {
    return to_float(load(at + which * apart));
}

// --- reductions ------------------------------------------------------------------------------------------------------

// Combines lane i with lane i + 8, then i + 4, i + 2 and i + 1.
template <class Combine>
TGI_INLINE float reduce(Float x, Combine combine) {
    alignas(64) float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] = combine(lanes[lane], lanes[lane + width]);
    return lanes[0];
}

#if defined(__AVX512F__)
TGI_INLINE __m256 upper_half(Float x) { return _mm512_extractf32x8_ps(x.part[0], 1); }
TGI_INLINE __m256 lower_half(Float x) { return _mm512_castps512_ps256(x.part[0]); }
#elif defined(__AVX2__)
TGI_INLINE __m256 upper_half(Float x) { return x.part[1]; }
TGI_INLINE __m256 lower_half(Float x) { return x.part[0]; }
#endif

TGI_INLINE float reduce_add(Float x) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_add_ps(lower_half(x), upper_half(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return reduce(x, [](float a, float b) { return a + b; });
#endif
}

TGI_INLINE int32_t reduce_max(Int x) {
    alignas(64) int32_t lanes[LANES];
    store(lanes, x);
    return *std::max_element(lanes, lanes + LANES);
}

TGI_INLINE float reduce_max(Float x) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_max_ps(lower_half(x), upper_half(x));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    return reduce(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

// --- the dot engine: an Int as 16 pairs of bfloat16 numbers, or as 16 quadruples of bytes -----------------------------

#if TGI_DOT_ENGINE

// Four pairs or quadruples that follow each other in a row; each is multiplied with all of a vector.
struct RowPairs {
    TGI_INLINE void set(const bf16* from) {
#if defined(__x86_64__)
        at = from;
#else
        four = vld1q_s32((const int32_t*)from);
#endif
    }

#if defined(__x86_64__)
    template <int j>
    TGI_INLINE __m512i get() const {
        int32_t pair;
        memcpy(&pair, at + 2 * j, 4);
        return _mm512_set1_epi32(pair);
    }

    const bf16* at;
#else
    int32x4_t four;
#endif
};

// Adds the products of two bfloat16 numbers, pair j of a row, with those of a vector. Instruction sets round the steps
// differently.
template <int j>
TGI_INLINE Float dot(Float sums, RowPairs row, Int x) {
#if defined(__x86_64__)
    sums.part[0] = _mm512_dpbf16_ps(sums.part[0], (__m512bh)row.get<j>(), (__m512bh)x.part[0]);
#else
    TGI_EACH_REGISTER sums.part[i] = vbfdotq_laneq_f32(sums.part[i], vreinterpretq_bf16_s32(x.part[i]),
        vreinterpretq_bf16_s32(row.four), j);
#endif
    return sums;
}

// Adds the products of four unsigned bytes, quadruple j of a row, with four signed bytes of a vector.
template <int j>
TGI_INLINE Int dot(Int sums, RowPairs row, Int x) {
#if defined(__x86_64__)
    sums.part[0] = (IntRegister)_mm512_dpbusd_epi32((__m512i)sums.part[0], row.get<j>(), (__m512i)x.part[0]);
#else
    TGI_EACH_REGISTER sums.part[i] = vsudotq_laneq_s32(sums.part[i], vreinterpretq_s8_s32(x.part[i]),
        vreinterpretq_u8_s32(row.four), j);
#endif
    return sums;
}

// Adds the products of four signed bytes, quadruple j of a row, with four unsigned bytes of a vector.
template <int j>
TGI_INLINE Int dot_unsigned(Int sums, RowPairs row, Int x) {
#if defined(__x86_64__)
    sums.part[0] = (IntRegister)_mm512_dpbusd_epi32((__m512i)sums.part[0], (__m512i)x.part[0], row.get<j>());
#else
    TGI_EACH_REGISTER sums.part[i] = vusdotq_laneq_s32(sums.part[i], vreinterpretq_u8_s32(x.part[i]),
        vreinterpretq_s8_s32(row.four), j);
#endif
    return sums;
}

// The lanes from 8 `half` to 8 `half` + 7, each twice.
template <int half>
TGI_INLINE Float twice(Float x) {
#if defined(__x86_64__)
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return {{_mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(8 * half)), x.part[0])}};
#else
    const FloatRegister first = x.part[2 * half], second = x.part[2 * half + 1];
    return {{vzip1q_f32(first, first), vzip2q_f32(first, first),  //
        vzip1q_f32(second, second), vzip2q_f32(second, second)}};
#endif
}

// Sixteen bytes, each in all four bytes of its lane.
TGI_INLINE Int load_four_times(const uint8_t* at) {
    alignas(64) static constexpr uint8_t BYTES[] = {
        0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7,
        8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 11, 11, 11, 11, 12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15,
        15, 15};
#if defined(__x86_64__)
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)at));
    return {{(IntRegister)_mm512_shuffle_epi8(bytes, _mm512_load_si512(BYTES))}};
#else
    const uint8x16_t bytes = vld1q_u8(at);
    Int x;
    TGI_EACH_REGISTER x.part[i] = vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vld1q_u8(BYTES + 16 * i)));
    return x;
#endif
}

// Stores every second byte, from the first on: 32 bytes.
TGI_INLINE void store_even_bytes(uint8_t* at, Int x) {
#if defined(__x86_64__)
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi16_epi8((__m512i)x.part[0]));
#else
    for (int i = 0; i < REGISTERS; i += 2)
        vst1q_u8(at + 8 * i, vuzp1q_u8(vreinterpretq_u8_s32(x.part[i]), vreinterpretq_u8_s32(x.part[i + 1])));
#endif
}

// The number `first` + n for the lower four bits n of a lane; the other bits are ignored.
struct NibbleNumbers {
    TGI_INLINE explicit NibbleNumbers(int first)
#if defined(__x86_64__)
        : table{{(FloatRegister)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) + float(first)}} {}

    TGI_INLINE Float of(Int lanes) const {
        return {{_mm512_permutexvar_ps((__m512i)lanes.part[0], table.part[0])}};
    }

    const Float table;
#else
        : first(broadcast(int32_t(first))) {}

    TGI_INLINE Float of(Int lanes) const { return to_float((lanes & broadcast(15)) + first); }

    const Int first;
#endif
};

// The number of E2M1_DOUBLED for the lower four bits of a lane; the other bits are ignored.
struct Float4Numbers {
#if defined(__x86_64__)
    TGI_INLINE Float of(Int lanes) const {
        return {{_mm512_permutexvar_ps((__m512i)lanes.part[0], table.part[0])}};
    }

    const Float table{{(FloatRegister)_mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)}};
#else
    TGI_INLINE Float of(Int lanes) const {
        Int x;
        TGI_EACH_REGISTER {
            const uint8x16_t at = vreinterpretq_u8_s32(lanes.part[i] & vdupq_n_s32(15));
            x.part[i] = vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s8(vqtbl1q_s8(table, at)), 24), 24);
        }
        return to_float(x);
    }

    const int8x16_t table = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#endif
};

// 4-bit floats as bytes: 12 + the number of E2M1_DOUBLED for each code.
struct Float4Bytes {
    static constexpr int32_t ZERO = 12;

    // Of the lower halves of 64 bytes, or of the upper ones.
    template <int half>
    TGI_INLINE Int of(Int codes) const {
#if defined(__x86_64__)
        const Int shifted = half ? shift_right(codes, 4) : codes;
        return {{(IntRegister)_mm512_shuffle_epi8(table, (__m512i)(shifted & broadcast(0x0f0f0f0f)).part[0])}};
    }

    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
#else
        TGI_EACH_REGISTER {
            const uint8x16_t bytes = vreinterpretq_u8_s32(codes.part[i]);
            const uint8x16_t index = half ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
            codes.part[i] = vreinterpretq_s32_u8(vqtbl1q_u8(table, index));
        }
        return codes;
    }

    const uint8x16_t table = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#endif
};

// Decodes codes of MXFP4 in the layout of packed_weight.cpp to bfloat16 tiles as of `amx_columns`.
struct Mxfp4Numbers {
#if defined(__x86_64__)
    // The exponents of 32 scales, from 127 - 41 to 127 + 40.
    TGI_INLINE void set(const uint8_t* scales) {
        for (int half = 0; half < 2; half++) {
            const __m128i each = _mm_loadu_si128((const __m128i*)(scales + 16 * half));
            const __m256i twice = _mm256_set_m128i(_mm_unpackhi_epi8(each, each), _mm_unpacklo_epi8(each, each));
            const __m512i below = _mm512_sub_epi16(_mm512_set1_epi16(127 + 40), _mm512_cvtepu8_epi16(twice));
            below_[half] = _mm512_slli_epi16(below, 7);
        }
    }

    // Writes a row of 64 bytes of codes: two rows of both tiles.
    TGI_INLINE void store(bf16* to, const uint8_t* codes) const {
        const __m512i all = _mm512_loadu_si512(codes);
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            // Bits of the codes of a pair of inputs, for each two outputs: of inputs 0 and 1 or 2 and 3, in the lower or
            // the upper half of the bytes.
            const int64_t first = 16 * (n % 2) + 4 * (n / 2);
            const __m512i bits = _mm512_set1_epi64(first | (first + 8) << 16 | (first + 32) << 32 | (first + 40) << 48);
            const __m512i number = _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(bits, all), table_);
            // A difference of exponents; a zero stays zero, since it does not get smaller.
            _mm512_storeu_si512(to + 32 * (n % 2) + 512 * (n / 2), _mm512_subs_epu16(number, below_[n / 2]));
        }
    }

  private:
    // The bits of E2M1_DOUBLED * 2^40, twice, since indices have five bits, the last of which is another code's.
    static constexpr uint16_t NUMBERS[32] = {
        0, 0x5380, 0x5400, 0x5440, 0x5480, 0x54c0, 0x5500, 0x5540,
        0, 0xd380, 0xd400, 0xd440, 0xd480, 0xd4c0, 0xd500, 0xd540,
        0, 0x5380, 0x5400, 0x5440, 0x5480, 0x54c0, 0x5500, 0x5540,
        0, 0xd380, 0xd400, 0xd440, 0xd480, 0xd4c0, 0xd500, 0xd540};
    const __m512i table_ = _mm512_loadu_si512(NUMBERS);
    __m512i below_[2];
#else
    // Without AMX, numbers are needed of gathered rows alone.
    void set(const uint8_t* scales) { scales_ = scales; }

    void store(bf16* to, const uint8_t* codes) const {
        static constexpr int8_t NUMBERS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        for (int n = 0; n < 32; n++)
            for (int i = 0; i < 4; i++) {
                const int32_t exponent = scales_[n] << 23, code = codes[n % 16 * 4 + i] >> n / 16 * 4 & 15;
                float scale;
                memcpy(&scale, &exponent, sizeof scale);
                to[n / 16 * 512 + i / 2 * 32 + n % 16 * 2 + i % 2] = round_to<bf16>(NUMBERS[code] * scale);
            }
    }

  private:
    const uint8_t* scales_;
#endif
};

// A table of 128 bytes.
struct ByteTable {
#if defined(__x86_64__)
    explicit ByteTable(const uint8_t* at) : low(_mm512_loadu_si512(at)), high(_mm512_loadu_si512(at + 64)) {}

    // The entries for indices below 128, which are bytes.
    TGI_INLINE Int look_up(Int indices) const {
        return {{(IntRegister)_mm512_permutex2var_epi8(low, (__m512i)indices.part[0], high)}};
    }

    const __m512i low, high;
#else
    explicit ByteTable(const uint8_t* at) : low(vld1q_u8_x4(at)), high(vld1q_u8_x4(at + 64)) {}

    TGI_INLINE Int look_up(Int indices) const {
        TGI_EACH_REGISTER {
            const uint8x16_t index = vreinterpretq_u8_s32(indices.part[i]);
            // An index out of range gives 0 in the first half, and keeps that of the first half in the second.
            const uint8x16_t found = vqtbx4q_u8(vqtbl4q_u8(low, index), high, vsubq_u8(index, vdupq_n_u8(64)));
            indices.part[i] = vreinterpretq_s32_u8(found);
        }
        return indices;
    }

    const uint8x16x4_t low, high;
#endif
};

#endif

}  // namespace tgi
