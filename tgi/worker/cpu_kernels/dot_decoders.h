// Decoders of quantized panels for the dot engine, for products and for gathered rows. packed_weight.cpp describes the layouts.
//
// GroupDecoder computes bfloat16(scale * code + shift) in float32. The product is exact (a float16 has 11 significant
// bits, a code 8), so a fused multiply-add gives the same. Scales and shifts are multiples of 2^-24, so results are
// zero or far above the subnormal numbers, which the conversion to bfloat16 flushes to zero.
//
// NibbleDecoder maps 4-bit codes to 8-bit integers by a table of 16 numbers for each of 8 factors.
#pragma once
#include <immintrin.h>

#include <type_traits>

#include "packed_weight.h"
#include "dot_tile.h"

namespace tgi {

// A value per output for 32 outputs, expanded for the vectors of a tile: vector v has the values of outputs 8 v to 8 v
// + 7, each twice, for both inputs of a pair.
struct OutputVectors {
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

// Decodes a panel of codes in groups with scales, 32 inputs at a time.
template <int bits, bool shifts>
class GroupDecoder {
  public:
    static constexpr int64_t step = 32, right = 512;  // as of `amx_columns`

    GroupDecoder(const PackedWeight& packed, const uint8_t* panel)
        : group_(packed.form.group), at_(panel), inputs_left_(packed.inputs) {}

    // The next 32 inputs, in a buffer of the decoder.
    const bf16* next_block() {
        if (!decoded_ahead_) decode(buffers_[buffer_]), decoded_ahead_ = true;
        bf16* const found = buffers_[buffer_];
        buffer_ ^= 1;
        // Decodes one block ahead, so that AMX does not wait for what has just been written.
        if (inputs_left_ > 0) decode(buffers_[buffer_]);
        return found;
    }

    // Writes the next 32 inputs to `to`.
    void decode(bf16* to) {
        constexpr int64_t TILE = 64 * bits;  // bytes
        for (int64_t line = 0; line <= 2 * TILE; line += CACHE_LINE) prefetch_l1(at_ + PREFETCH_DISTANCE + line);
        inputs_left_ -= 32;
        if (group_ == 16) {
            const uint8_t* codes = at_ + 2 * SCALES;
            for (int half = 0; half < 2; half++) {
                scale(at_ + half * SCALES);
                tiles<8>(codes + half * TILE / 2, to + half * 256);
            }
            at_ = codes + 2 * TILE;
            return;
        }
        if (group_inputs_left_ == 0) scale(at_), at_ += SCALES, group_inputs_left_ = group_;
        group_inputs_left_ -= 32;
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

    static __m512 load_eight_bit(const uint8_t* codes) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
    }

    // Decodes `rows` rows of both tiles.
    template <int rows>
    void tiles(const uint8_t* codes, bf16* to) const {
        const __m512 table = shifts ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                    : _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        for (int v = 0; v < 4; v += 2, codes += 64 * bits, to += 512) {
            const __m512 scale[2] = {scale_.each[v], scale_.each[v + 1]}, shift[2] = {shift_.each[v],
                shift_.each[v + 1]};
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                __m512 left, right;
                if (bits == 8) {
                    left = load_eight_bit(codes + 32 * row), right = load_eight_bit(codes + 32 * row + 16);
                } else {  // the permutation uses the lower four bits of each lane and ignores the others
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
    int64_t inputs_left_, group_inputs_left_ = 0;
    bool decoded_ahead_ = false;
    int buffer_ = 0;
    OutputVectors scale_, shift_;
    alignas(64) bf16 buffers_[2][1024];
};

// Calls `use` with the second template argument of GroupDecoder for this format.
template <class Use>
void with_shifts(const WeightFormat& form, const Use& use) {
    form.shifts ? use(std::true_type()) : use(std::false_type());
}

// Decodes a panel of 4-bit codebook codes, 64 inputs at a time: row by row in registers (ColumnBlock), or to memory.
class NibbleDecoder {
  public:
    static constexpr int64_t step = 32, right = 512;  // as of `amx_columns`

    // Starts at input `from`, a multiple of 64.
    NibbleDecoder(const PackedWeight& weight, const uint8_t* panel, int64_t from)
        : factors_(panel + 2 * WeightFormat::SCALES + from / 64 * PANEL),
          at_(panel + weight.form.header_bytes(weight.inputs) + from / 64 * BYTES),
          first_(_mm512_loadu_si512(weight.at)), second_(_mm512_loadu_si512(weight.at + 64)) {}

    // The next 64 inputs, in a buffer of the decoder.
    const bf16* next_block() {
        decode(buffer_);
        return buffer_;
    }

    // Writes the next 64 inputs to `to`.
    inline void decode(bf16* to);

  private:
    friend struct ColumnBlock<NibbleDecoder>;
    static constexpr int64_t BYTES = 1024;  // of the codes of 64 inputs

    const uint8_t *factors_, *at_;
    const __m512i first_, second_;  // the halves of the table
    alignas(64) bf16 buffer_[1024];
};

template <>
struct ColumnBlock<NibbleDecoder> {
    explicit ColumnBlock(NibbleDecoder& all) : at(all.at_), low(all.first_), high(all.second_) {
        for (int64_t line = 0; line < NibbleDecoder::BYTES; line += CACHE_LINE) prefetch_l1(at + PREFETCH_DISTANCE +
            line);
        // Further ahead than fits the L1 cache
        prefetch_l2(at + 2 * PREFETCH_DISTANCE, NibbleDecoder::BYTES / CACHE_LINE);
        const __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)all.factors_));
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int side = 0; side < 2; side++) {
            const __m512i output = _mm512_add_epi32(lane, _mm512_set1_epi32(16 * side));
            const __m512i four = _mm512_mullo_epi32(output, _mm512_set1_epi32(0x01010101));
            const __m512i both = _mm512_permutexvar_epi8(four, bytes), factor = _mm512_set1_epi8(0x70);
            factors[side][0] = _mm512_and_si512(_mm512_slli_epi16(both, 4), factor);
            factors[side][1] = _mm512_and_si512(both, factor);
        }
        all.at_ += NibbleDecoder::BYTES, all.factors_ += PANEL;
    }

    __m512i first(int row) const { return number(_mm512_loadu_si512(at + 64 * row), factors[0][row / 8]); }
    __m512i second(int row) const { return number(_mm512_srli_epi16(_mm512_loadu_si512(at + 64 * row), 4),
        factors[1][row / 8]); }

  private:
    // An index of the table: bits 4 to 6 are the factor, bits 0 to 3 the code.
    __m512i number(__m512i codes, __m512i factor) const {
        constexpr int EITHER = 0xea;  // (a & b) | c
        return _mm512_permutex2var_epi8(low, _mm512_ternarylogic_epi64(codes, _mm512_set1_epi8(0x0f), factor, EITHER),
            high);
    }

    const uint8_t* at;
    const __m512i low, high;
    __m512i factors[2][2];  // of the left and right outputs, for the first 32 inputs and the other 32
};

void NibbleDecoder::decode(bf16* to) {
    const ColumnBlock<NibbleDecoder> block(*this);
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        _mm512_store_si512(to + 32 * row, block.first(row));
        _mm512_store_si512(to + right + 32 * row, block.second(row));
    }
}

}  // namespace tgi
