// Turns codes into numbers: bfloat16(scale * code + shift), computed in float32. How they lie, packed.cpp says.
//
// The product is exact (a float16 has 11 bits, a code 8), so it makes no difference that it is not rounded before the
// shift is added. Scales and shifts are multiples of 2^-24, so what comes out is zero or far from the subnormal numbers,
// which the conversion to bfloat16 would take for zero.
#pragma once
#include <immintrin.h>

#include <type_traits>

#include "packed.h"
#include "product.h"

namespace tgi {

// What 32 outputs have in common for some inputs, as the vectors of a tile need it: vector v has that of the outputs 8 v
// to 8 v + 7, each for both inputs of a pair.
struct Spread {
    void set(const uint8_t* halves) {
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        for (int v = 0; v < 4; v += 2) {
            const __m512 both = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(halves + 16 * v)));
            each[v] = _mm512_permutexvar_ps(twice, both);
            each[v + 1] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), both);
        }
    }

    __m512 each[4];
};

// A panel of codes on its way through the inputs, 32 of them at a time.
template <int bits, bool shifts>
class Codes {
  public:
    static constexpr int64_t step = 32, right = 512;  // as `tiled` columns

    Codes(const Packed& packed, const uint8_t* panel)
        : group_(packed.form.group), at_(panel), left_(packed.inputs) {}

    // The next 32 inputs, in memory of its own.
    const bf16* block() {
        if (!ahead_) next(rooms_[room_]), ahead_ = true;
        bf16* const found = rooms_[room_];
        room_ ^= 1;
        // The next but one: AMX then need not wait for what has just been written.
        if (left_ > 0) next(rooms_[room_]);
        return found;
    }

    // Writes the next 32 inputs.
    void next(bf16* to) {
        constexpr int64_t TILE = 64 * bits;  // bytes
        for (int64_t line = 0; line <= 2 * TILE; line += LINE) soon(at_ + AHEAD + line);
        left_ -= 32;
        if (group_ == 16) {
            const uint8_t* codes = at_ + 2 * SCALES;
            for (int half = 0; half < 2; half++) {
                scale(at_ + half * SCALES);
                tiles<8>(codes + half * TILE / 2, to + half * 256);
            }
            at_ = codes + 2 * TILE;
            return;
        }
        if (inside_ == 0) scale(at_), at_ += SCALES, inside_ = group_;
        inside_ -= 32;
        tiles<16>(at_, to);
        at_ += 2 * TILE;
    }

  private:
    static constexpr int64_t SCALES = shifts ? 128 : 64;  // bytes of a group

    void scale(const uint8_t* at) {
        scale_.set(at);
        if (shifts) shift_.set(at + 64);
    }

    static __m512 number(__m512 code, __m512 scale, __m512 shift) {
        return shifts ? _mm512_fmadd_ps(code, scale, shift) : _mm512_mul_ps(code, scale);
    }

    static __m512 eight(const uint8_t* codes) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
    }

    // So many rows of both tiles.
    template <int rows>
    void tiles(const uint8_t* codes, bf16* to) const {
        const __m512 table = shifts ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                    : _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        for (int v = 0; v < 4; v += 2, codes += 64 * bits, to += 512) {
            const __m512 scale[2] = {scale_.each[v], scale_.each[v + 1]}, shift[2] = {shift_.each[v], shift_.each[v + 1]};
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                __m512 left, right;
                if (bits == 8) {
                    left = eight(codes + 32 * row), right = eight(codes + 32 * row + 16);
                } else {  // the lower four bits of a lane choose, whatever stands above them
                    const __m512i words = _mm512_loadu_si512(codes + row / 4 * 64);
                    left = _mm512_permutexvar_ps(_mm512_srli_epi32(words, row % 4 * 8), table);
                    right = _mm512_permutexvar_ps(_mm512_srli_epi32(words, row % 4 * 8 + 4), table);
                }
                left = number(left, scale[0], shift[0]), right = number(right, scale[1], shift[1]);
                _mm512_store_si512(to + 32 * row, (__m512i)_mm512_cvtne2ps_pbh(right, left));
            }
        }
    }

    const int64_t group_;
    const uint8_t* at_;
    int64_t left_, inside_ = 0;
    bool ahead_ = false;
    int room_ = 0;
    Spread scale_, shift_;
    alignas(64) bf16 rooms_[2][1024];
};

// Calls `use` with the two arguments that Codes takes for this form, as constants.
template <class Use>
void with_form(const Form& form, Use use) {
    using Eight = std::integral_constant<int, 8>;
    using Four = std::integral_constant<int, 4>;
    using Yes = std::true_type;
    using No = std::false_type;
    if (form.bits == 8) form.shifts ? use(Eight(), Yes()) : use(Eight(), No());
    else form.shifts ? use(Four(), Yes()) : use(Four(), No());
}

}  // namespace tgi
