// Turns codes into numbers: bfloat16(scale * code + shift), computed in float32.
//
// The product is exact (a float16 has 11 bits, a code 8), so it makes no difference that it is not rounded before the
// shift is added. Scales and shifts are multiples of 2^-24, so what comes out is zero or far from the subnormal numbers,
// which the conversion to bfloat16 would take for zero.
#include <immintrin.h>

#include "packed.h"

namespace tgi {
namespace {

// The 16 numbers that vector v of a tile needs, of 32 that belong to an output each: those of the outputs 8 v to 8 v + 7,
// each for both inputs of a pair.
template <bool there>
struct Spread {
    explicit Spread(const uint8_t* halves) {
        if (!there) return;
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        for (int v = 0; v < 4; v += 2) {
            const __m512 both = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(halves + 32 * (v / 2))));
            each[v] = _mm512_permutexvar_ps(twice, both);
            each[v + 1] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), both);
        }
    }

    __m512 each[4];
};

template <bool shifts>
inline __m512 number(__m512 code, int v, const Spread<true>& scale, const Spread<shifts>& shift) {
    return shifts ? _mm512_fmadd_ps(code, scale.each[v], shift.each[v]) : _mm512_mul_ps(code, scale.each[v]);
}

inline void put(bf16* to, __m512 left, __m512 right) {
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

inline __m512 eight(const uint8_t* codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
}

// `rows` rows of both tiles of 32 inputs; those of the second begin `second` bytes after those of the first.
template <int bits, bool shifts>
inline void tiles(const uint8_t* codes, int64_t second, int rows, const Spread<true>& scale, const Spread<shifts>& shift,
                  bf16* to) {
    const int v[2] = {0, 2};
    for (int tile = 0; tile < 2; tile++, codes += second, to += 512) {
        const int left = 2 * tile, right = left + 1;
        if (bits == 8) {
            for (int row = 0; row < rows; row++)
                put(to + 32 * row, number(eight(codes + 32 * row), left, scale, shift),
                    number(eight(codes + 32 * row + 16), right, scale, shift));
        } else {
            const __m512 table = shifts ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                        : _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
            for (int row = 0; row < rows; row++) {
                const __m512i words = _mm512_loadu_si512(codes + row / 4 * 64);
                const __m512i one = _mm512_srli_epi32(words, row % 4 * 8), two = _mm512_srli_epi32(words, row % 4 * 8 + 4);
                // The lower four bits of a lane choose, whatever stands above them.
                put(to + 32 * row, number(_mm512_permutexvar_ps(one, table), left, scale, shift),
                    number(_mm512_permutexvar_ps(two, table), right, scale, shift));
            }
        }
    }
}

template <int bits, bool shifts>
void all(const uint8_t* at, int64_t group, int64_t count, bf16* to) {
    constexpr int64_t TILE = 64 * bits, SCALES = 64, GROUP = shifts ? 2 * SCALES : SCALES;
    if (group == 16) {
        for (int64_t k = 0; k < count; k += 32, at += 2 * TILE + 2 * GROUP, to += 1024)
            for (int half = 0; half < 2; half++) {
                const Spread<true> scale(at + half * GROUP);
                const Spread<shifts> shift(at + half * GROUP + SCALES);
                tiles<bits>(at + 2 * GROUP + half * TILE / 2, TILE, 8, scale, shift, to + half * 256);
            }
        return;
    }
    for (int64_t k = 0; k < count; k += group) {
        const Spread<true> scale(at);
        const Spread<shifts> shift(at + SCALES);
        at += GROUP;
        for (int64_t j = 0; j < group; j += 32, at += 2 * TILE, to += 1024) tiles<bits>(at, TILE, 16, scale, shift, to);
    }
}

}  // namespace

void widen(const Packed& packed, const uint8_t* panel, int64_t from, int64_t count, bf16* to) {
    const Form& form = packed.form;
    const uint8_t* at = panel + form.bytes(from);
    if (form.bits == 8) form.shifts ? all<8, true>(at, form.group, count, to) : all<8, false>(at, form.group, count, to);
    else form.shifts ? all<4, true>(at, form.group, count, to) : all<4, false>(at, form.group, count, to);
}

}  // namespace tgi
