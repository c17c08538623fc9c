// The layout of packed weights: panels of 32 outputs, stored in the order in which `linear` reads them.
// packed_weight.cpp describes the tiles inside a panel, dot_decoders.h and fma_decoders.h the decoding.
#pragma once
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

constexpr int64_t PANEL = 32;  // outputs that are computed together

// The formats of one kind share the code of products (linear_of).
enum class FormatKind { numbers, eight_bit_groups, four_bit_groups, four_bit_floats, mxfp4, integers };

// The format of a weight: plain numbers (bfloat16 or float16 with 16 bits, or float32); 8-bit or 4-bit codes in groups,
// with a scale and perhaps a shift, in float16 or float32, for each output and `group` inputs, where 4-bit codes may be
// `floats`, those of E2M1_DOUBLED (quantization/weight.py), which have no shifts, and on the dot engine are `mxfp4` where
// they are in groups of 32 with powers of two as scales; or `integer`: 8-bit
// integers with one scale for each output, stored as such or as 4-bit codebook codes with a factor for each output and
// 32 inputs.
//
// A gate and an up projection of the same format are packed together, with alternating panels: `weights` is 2.
struct WeightFormat {
    explicit WeightFormat(int64_t code)
        : bits(code & 255), group(code >> 8 & 255), shifts(code >> 16 & 1), integer(code >> 17 & 1),
          weights(1 + (code >> 18 & 1)), half(code >> 19 & 1), scale_bytes(code >> 20 & 1 ? 4 : 2), floats(code >> 21 & 1),
          mxfp4(TGI_DOT_ENGINE && code >> 22 & 1) {}

    FormatKind kind() const {
        if (integer) return FormatKind::integers;
        if (!group) return FormatKind::numbers;
        if (mxfp4) return FormatKind::mxfp4;
        if (floats) return FormatKind::four_bit_floats;
        return bits == 8 ? FormatKind::eight_bit_groups : FormatKind::four_bit_groups;
    }

    // Whether a panel holds numbers, which need no decoding; the dot engine also multiplies 8-bit integers as they are.
    bool is_plain() const { return bits >= 16 || (TGI_DOT_ENGINE && integer && bits == 8); }

    // Inputs that are stored together: first the scales and shifts of 32 outputs, then their codes.
    int64_t unit() const { return group > 32 ? group : 32; }

    // Inputs of a panel, with padding.
    int64_t padded_inputs(int64_t inputs) const {
        const int64_t multiple = TGI_DOT_ENGINE && integer ? 64 : 32;
        return (inputs + multiple - 1) / multiple * multiple;
    }

    // Bytes before the first panel: the codebook.
    int64_t table_bytes() const { return integer && bits == 4 ? TABLE : 0; }

    // Bytes of a panel before its codes: for integers the scales, and for the dot engine the corrections of sums and the
    // factors; for mxfp4 the scales of all groups.
    int64_t header_bytes(int64_t inputs) const {
        if (mxfp4) return (inputs / 32 * PANEL + 63) / 64 * 64;
        if (!integer) return 0;
        if (!TGI_DOT_ENGINE) return SCALES;
        return 2 * SCALES + (bits == 4 ? (padded_inputs(inputs) / 64 * PANEL + 63) / 64 * 64 : 0);
    }

    // Bytes of the factors before the codes of 32 inputs.
    int64_t factor_bytes() const { return !TGI_DOT_ENGINE && integer && bits == 4 ? PANEL : 0; }

    // Bytes of the scales and shifts of a group.
    int64_t group_bytes() const { return mxfp4 ? 0 : PANEL * scale_bytes * (1 + shifts); }

    // Bytes of a panel of `inputs` inputs, a multiple of `unit` if there are groups.
    int64_t panel_bytes(int64_t inputs) const {
        const int64_t padded = padded_inputs(inputs);
        return header_bytes(inputs) + padded * PANEL * bits / 8 + padded / 32 * factor_bytes() +
            (group ? inputs / group * group_bytes() : 0);
    }

    static constexpr int64_t TABLE = 128, SCALES = PANEL * 4;
    int64_t bits, group, shifts, integer, weights, half, scale_bytes, floats, mxfp4;
};

// A weight [outputs, inputs] in panels of 32 outputs, the last one padded with zeros; or a gate and an up projection of
// this shape.
struct PackedWeight {
    const uint8_t* panel(int64_t number) const { return at + form.table_bytes() + number * form.panel_bytes(inputs); }
    // Of PANEL outputs, each with one or two panels
    int64_t output_blocks() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t panels() const { return output_blocks() * form.weights; }
    int64_t bytes() const { return form.table_bytes() + panels() * form.panel_bytes(inputs); }

    const uint8_t* at;
    int64_t outputs, inputs;
    WeightFormat form;
};

// Each function packs one weight: `part` is 0 for a single weight or a gate, 1 for an up projection. Inputs up to a
// multiple of 32 are padded with zeros; with groups, `inputs` is a multiple of 32 and of the group.

// Numbers of the format's type.
void pack(ThreadPool& pool, const void* weight, const PackedWeight& packed, int64_t part);
// The columns of a QuantizedWeight, with scales and shifts of the format's type; `shifts` is null if there are none.
void pack_grouped(ThreadPool& pool, const uint8_t* codes, const void* scales, const void* shifts,
    const PackedWeight& packed, int64_t part);
// Integers: codes and one scale for each output; with 4 bits also factors [outputs, inputs / 32] and the codebook
// [8][16].
void pack_integer(ThreadPool& pool, const uint8_t* codes, const f16* scales, const uint8_t* factors,
    const int8_t* table, const PackedWeight& packed, int64_t part);

}  // namespace tgi
