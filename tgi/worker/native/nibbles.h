// Turns codes of 4 bits into whole numbers of 8: a table has 16 for each of 8 factors. How they lie, packed.cpp says.
#pragma once
#include "packed.h"
#include "product.h"

namespace tgi {

// A panel of codes on its way through the inputs, 64 of them at a time: row by row (Block), or in memory.
class Nibbles {
  public:
    static constexpr int64_t step = 32, right = 512;  // as `tiled` columns

    // From input `from` on, a multiple of 64.
    Nibbles(const Packed& weight, const uint8_t* panel, int64_t from)
        : factors_(panel + Form::SCALES + from / 64 * PANEL),
          at_(panel + weight.form.head(weight.inputs) + from / 64 * BYTES),
          first_(_mm512_loadu_si512(weight.at)), second_(_mm512_loadu_si512(weight.at + 64)) {}

    // The next 64 inputs, in memory of its own.
    const bf16* block() {
        next(room_);
        return room_;
    }

    // Writes the next 64 inputs.
    inline void next(bf16* to);

  private:
    friend struct Block<Nibbles>;
    static constexpr int64_t BYTES = 1024;  // of the codes of 64 inputs

    const uint8_t *factors_, *at_;
    const __m512i first_, second_;  // the halves of the table
    alignas(64) bf16 room_[1024];
};

template <>
struct Block<Nibbles> {
    explicit Block(Nibbles& all) : at(all.at_), low(all.first_), high(all.second_) {
        for (int64_t line = 0; line < Nibbles::BYTES; line += LINE) soon(at + AHEAD + line);
        ask(at + 2 * AHEAD, Nibbles::BYTES / LINE);  // farther ahead than the first cache has room for
        const __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)all.factors_));
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int side = 0; side < 2; side++) {
            const __m512i output = _mm512_add_epi32(lane, _mm512_set1_epi32(16 * side));
            const __m512i four = _mm512_mullo_epi32(output, _mm512_set1_epi32(0x01010101));
            const __m512i both = _mm512_permutexvar_epi8(four, bytes), factor = _mm512_set1_epi8(0x70);
            factors[side][0] = _mm512_and_si512(_mm512_slli_epi16(both, 4), factor);
            factors[side][1] = _mm512_and_si512(both, factor);
        }
        all.at_ += Nibbles::BYTES, all.factors_ += PANEL;
    }

    __m512i first(int row) const { return number(_mm512_loadu_si512(at + 64 * row), factors[0][row / 8]); }
    __m512i second(int row) const { return number(_mm512_srli_epi16(_mm512_loadu_si512(at + 64 * row), 4), factors[1][row / 8]); }

  private:
    // Bits 4 to 6 of a place in the table are the factor, those below the code.
    __m512i number(__m512i codes, __m512i factor) const {
        constexpr int EITHER = 0xea;  // a & b | c
        return _mm512_permutex2var_epi8(low, _mm512_ternarylogic_epi64(codes, _mm512_set1_epi8(0x0f), factor, EITHER), high);
    }

    const uint8_t* at;
    const __m512i low, high;
    __m512i factors[2][2];  // of the left and right outputs, for the first 32 inputs and the others
};

void Nibbles::next(bf16* to) {
    const Block<Nibbles> block(*this);
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        _mm512_store_si512(to + 32 * row, block.first(row));
        _mm512_store_si512(to + right + 32 * row, block.second(row));
    }
}

}  // namespace tgi
