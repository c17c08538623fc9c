// Decoders of quantized panels for the dot engine, for products and for gathered rows. packed_weight.cpp describes the layouts.
//
// GroupDecoder computes bfloat16(scale * code + shift) in float32. With scales in float16 the product is exact (a float16
// has 11 significant bits, a code 8), so a fused multiply-add gives the same. Scales and shifts are multiples of 2^-24,
// so results are zero or far above the subnormal numbers, which a conversion to bfloat16 may flush to zero. Scales in
// float32 have no shifts here, so that there is nothing to fuse.
//
// NibbleDecoder maps 4-bit codes to 8-bit integers by a table of 16 numbers for each of 8 factors.
#pragma once
#include <type_traits>

#include "packed_weight.h"
#include "dot_tile.h"

namespace tgi {

// A value per output for 32 outputs, expanded for the vectors of a tile: vector v has the values of outputs 8 v to 8 v
// + 7, each twice, for both inputs of a pair.
struct OutputVectors {
    // `wide`: the values are float32, else float16.
    TGI_INLINE void set(const uint8_t* values, bool wide) {
        for (int v = 0; v < 4; v += 2) {
            const Float both = wide ? load((const float*)values + 8 * v) : load((const f16*)values + 8 * v);
            each[v] = twice<0>(both), each[v + 1] = twice<1>(both);
        }
    }

    Float each[4];
};

// Two buffers for a decoder of 32 inputs at a time, which decodes one block ahead, so that AMX does not wait for what has
// just been written.
class BlocksAhead {
  public:
    // The next block of a decoder that has these inputs left, which its `decode` counts.
    template <class Decoder>
    TGI_INLINE const bf16* next(Decoder& decoder, const int64_t& inputs_left) {
        if (!begun_) decoder.decode(buffers_[current_]), begun_ = true;
        bf16* const found = buffers_[current_];
        current_ ^= 1;
        if (inputs_left > 0) decoder.decode(buffers_[current_]);
        return found;
    }

  private:
    bool begun_ = false;
    int current_ = 0;
    alignas(64) bf16 buffers_[2][1024];
};

// Decodes a panel of codes in groups with scales, 32 inputs at a time. `floats`: they are 4-bit floats.
template <int bits, bool shifts, bool floats = false>
class GroupDecoder {
  public:
    static constexpr int64_t step = 32, right = 512;  // as of `amx_columns`

    // Starts at input `from`, a multiple of a group and of 32.
    GroupDecoder(const PackedWeight& packed, const uint8_t* panel, int64_t from)
        : group_(packed.form.group), scale_bytes_(packed.form.group_bytes()), at_(panel + packed.form.panel_bytes(from)),
          inputs_left_(packed.inputs - from) {}

    // The next 32 inputs, in a buffer of the decoder.
    const bf16* next_block() { return blocks_.next(*this, inputs_left_); }

    // Writes the next 32 inputs to `to`.
    void decode(bf16* to) {
        constexpr int64_t TILE = 64 * bits;  // bytes
        for (int64_t line = 0; line <= 2 * TILE; line += CACHE_LINE) prefetch_l1(at_ + PREFETCH_DISTANCE + line);
        inputs_left_ -= 32;
        if (group_ == 16) {
            const uint8_t* codes = at_ + 2 * scale_bytes_;
            for (int half = 0; half < 2; half++) {
                scale(at_ + half * scale_bytes_);
                tiles<8>(codes + half * TILE / 2, to + half * 256);
            }
            at_ = codes + 2 * TILE;
            return;
        }
        if (group_inputs_left_ == 0) scale(at_), at_ += scale_bytes_, group_inputs_left_ = group_;
        group_inputs_left_ -= 32;
        tiles<16>(at_, to);
        at_ += 2 * TILE;
    }

  private:
    void scale(const uint8_t* at) {
        scale_.set(at, !shifts && scale_bytes_ == 4 * PANEL);
        if (shifts) shift_.set(at + 64, false);
    }

    TGI_INLINE static Float number(Float code, Float scale, Float shift) {
        return shifts ? fma(code, scale, shift) : code * scale;
    }

    // Decodes `rows` rows of both tiles.
    template <int rows>
    TGI_INLINE void tiles(const uint8_t* codes, bf16* to) const {
        const auto nibbles = [] {
            if constexpr (floats) return Float4Numbers();
            else return NibbleNumbers(shifts ? 0 : -8);
        }();
        for (int v = 0; v < 4; v += 2, codes += 64 * bits, to += 512) {
            const Float scale[2] = {scale_.each[v], scale_.each[v + 1]};
            const Float shift[2] = {shift_.each[v], shift_.each[v + 1]};
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                Float left, right;
                if (bits == 8) {
                    const auto* at = (const int8_t*)codes + 32 * row;
                    left = to_float(load(at)), right = to_float(load(at + 16));
                } else {
                    const Int words = load((const int32_t*)(codes + row / 4 * 64));
                    left = nibbles.of(shift_right(words, row % 4 * 8));
                    right = nibbles.of(shift_right(words, row % 4 * 8 + 4));
                }
                store(to + 32 * row, number(left, scale[0], shift[0]), number(right, scale[1], shift[1]));
            }
        }
    }

    const int64_t group_, scale_bytes_;  // inputs of a group, bytes of its scales and shifts
    const uint8_t* at_;
    int64_t inputs_left_, group_inputs_left_ = 0;
    OutputVectors scale_, shift_;
    BlocksAhead blocks_;
};

// Calls `use` with the second template argument of GroupDecoder for this format.
template <class Use>
void with_shifts(const WeightFormat& form, const Use& use) {
    form.shifts ? use(std::true_type()) : use(std::false_type());
}

// Decodes a panel of MXFP4, 32 inputs at a time.
class Mxfp4Decoder {
  public:
    static constexpr int64_t step = 32, right = 512;  // as of `amx_columns`

    // Starts at input `from`, a multiple of 32.
    Mxfp4Decoder(const PackedWeight& weight, const uint8_t* panel, int64_t from)
        : scales_(panel + from), at_(panel + weight.form.header_bytes(weight.inputs) + from * PANEL / 2),
          inputs_left_(weight.inputs - from) {}

    // The next 32 inputs, in a buffer of the decoder.
    const bf16* next_block() { return blocks_.next(*this, inputs_left_); }

    // Writes the next 32 inputs to `to`.
    void decode(bf16* to) {
        for (int64_t line = 0; line < BYTES; line += CACHE_LINE) prefetch_l1(at_ + PREFETCH_DISTANCE + line);
        numbers_.set(scales_);
#pragma GCC unroll 8
        for (int row = 0; row < 8; row++) numbers_.store(to + 64 * row, at_ + 64 * row);
        at_ += BYTES, scales_ += PANEL, inputs_left_ -= 32;
    }

  private:
    static constexpr int64_t BYTES = 512;  // of the codes of 32 inputs
    const uint8_t *scales_, *at_;
    int64_t inputs_left_;
    Mxfp4Numbers numbers_;
    BlocksAhead blocks_;
};

// The decoder of a panel of codes in groups.
template <FormatKind kind, bool shifts>
struct DecoderOf {
    static constexpr int BITS = kind == FormatKind::eight_bit_groups ? 8 : 4;
    static constexpr bool FLOATS = kind == FormatKind::four_bit_floats;
    using Type = GroupDecoder<BITS, shifts && !FLOATS, FLOATS>;
};

template <bool shifts>
struct DecoderOf<FormatKind::mxfp4, shifts> {
    using Type = Mxfp4Decoder;
};

// Decodes a panel of 4-bit codebook codes, 64 inputs at a time: row by row in registers (ColumnBlock), or to memory.
class NibbleDecoder {
  public:
    static constexpr int64_t step = 32, right = 512;  // as of `amx_columns`

    // Starts at input `from`, a multiple of 64.
    NibbleDecoder(const PackedWeight& weight, const uint8_t* panel, int64_t from)
        : factors_(panel + 2 * WeightFormat::SCALES + from / 64 * PANEL),
          at_(panel + weight.form.header_bytes(weight.inputs) + from / 64 * BYTES),
          table_(weight.at) {}

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
    const ByteTable table_;
    alignas(64) bf16 buffer_[1024];
};

template <>
struct ColumnBlock<NibbleDecoder> {
    TGI_INLINE explicit ColumnBlock(NibbleDecoder& all) : at(all.at_), table(all.table_) {
        for (int64_t line = 0; line < NibbleDecoder::BYTES; line += CACHE_LINE) prefetch_l1(at + PREFETCH_DISTANCE +
            line);
        // Further ahead than fits the L1 cache
        prefetch_l2(at + 2 * PREFETCH_DISTANCE, NibbleDecoder::BYTES / CACHE_LINE);
        const Int factor = broadcast(0x70707070);
        for (int side = 0; side < 2; side++) {
            const Int both = load_four_times(all.factors_ + 16 * side);
            factors[side][0] = shift_left(both, 4) & factor, factors[side][1] = both & factor;
        }
        all.at_ += NibbleDecoder::BYTES, all.factors_ += PANEL;
    }

    TGI_INLINE Int first(int row) const { return number(codes(row), factors[0][row / 8]); }
    TGI_INLINE Int second(int row) const { return number(shift_right(codes(row), 4), factors[1][row / 8]); }

  private:
    TGI_INLINE Int codes(int row) const { return load((const int32_t*)(at + 64 * row)); }

    // An index of the table: bits 4 to 6 are the factor, bits 0 to 3 the code.
    TGI_INLINE Int number(Int codes, Int factor) const {
        return table.look_up((codes & broadcast(0x0f0f0f0f)) | factor);
    }

    const uint8_t* at;
    const ByteTable table;
    Int factors[2][2];  // of the left and right outputs, for the first 32 inputs and the other 32
};

void NibbleDecoder::decode(bf16* to) {
    const ColumnBlock<NibbleDecoder> block(*this);
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        store((int32_t*)(to + 32 * row), block.first(row));
        store((int32_t*)(to + right + 32 * row), block.second(row));
    }
}

}  // namespace tgi
