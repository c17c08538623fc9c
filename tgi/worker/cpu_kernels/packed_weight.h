// The layout of packed weights: panels of 32 outputs, stored in the order in which `linear` reads them.
// packed_weight.cpp describes the tiles inside a panel, dequantize.h the decoding.
#pragma once
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

constexpr int64_t PANEL = 32;  // outputs that are computed together

// The format of a weight. bfloat16 (16 bits, no group); 8-bit or 4-bit codes in groups, with a float16 scale and
// perhaps a shift for each output and `group` inputs; or `integer`: 8-bit integers with one scale for each output
// (byte_planes.h), stored as such or as 4-bit codebook codes with a factor for each output and 32 inputs.
//
// A gate and an up projection of the same format are packed together, with alternating panels: `weights` is 2.
struct WeightFormat {
    explicit WeightFormat(int64_t number)
        : bits(number & 255), group(number >> 8 & 255), shifts(number >> 16 & 1), integer(number >> 17 & 1),
          weights(1 + (number >> 18 & 1)) {}

    // Whether a panel holds the operands of products, which need no decoding.
    bool is_plain() const { return bits == 16 || (integer && bits == 8); }

    // Inputs that are stored together: first the scales and shifts of 32 outputs, then their codes.
    int64_t unit() const { return group > 32 ? group : 32; }

    // Inputs of a panel, with padding.
    int64_t padded_inputs(int64_t inputs) const { return integer ? (inputs + 63) / 64 * 64 : inputs; }

    // Bytes before the first panel: the codebook.
    int64_t table_bytes() const { return integer && bits == 4 ? TABLE : 0; }

    // Bytes of a panel before its codes: for integers the scales, the corrections of sums, and the factors.
    int64_t header_bytes(int64_t inputs) const {
        if (!integer) return 0;
        return SCALES + (bits == 4 ? (padded_inputs(inputs) / 64 * PANEL + 63) / 64 * 64 : 0);
    }

    // Bytes of a panel of `inputs` inputs, a multiple of `unit`.
    int64_t panel_bytes(int64_t inputs) const {
        return header_bytes(inputs) + padded_inputs(inputs) * PANEL * bits / 8 +
            (group ? inputs / group * PANEL * 2 * (1 + shifts) : 0);
    }

    static constexpr int64_t TABLE = 128, SCALES = 2 * PANEL * 4;
    int64_t bits, group, shifts, integer, weights;
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

// Each function packs one weight: `part` is 0 for a single weight or a gate, 1 for an up projection. `inputs` is a
// multiple of 32 and of the group.
void pack(ThreadPool& pool, const bf16* weight, const PackedWeight& packed, int64_t part);
// The columns of a QuantizedWeight; `shifts` is null if the format has none.
void pack_grouped(ThreadPool& pool, const uint8_t* codes, const uint16_t* scales, const uint16_t* shifts,
                    const PackedWeight& packed, int64_t part);
// Integers: codes and one scale for each output; with 4 bits also factors [outputs, inputs / 32] and the codebook
// [8][16].
void pack_integer(ThreadPool& pool, const uint8_t* codes, const uint16_t* scales, const uint8_t* factors,
    const int8_t* table,
                const PackedWeight& packed, int64_t part);

}  // namespace tgi
