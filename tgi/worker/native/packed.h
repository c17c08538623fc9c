// How weights lie in memory: as `linear` reads them, from end to end. See packed.cpp and codes.h.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

using bf16 = uint16_t;

constexpr int64_t PANEL = 32;  // outputs that are computed together

// What stands for a number: itself in bfloat16 (16 bits, no group), or a code of 8 or 4 bits with a float16 scale, and
// perhaps a shift, of each output and `group` inputs. Or a whole number of 8 bits, with one scale for all inputs of an output
// (planes.h); codes of 4 bits stand for such by a table, and by one of 8 factors for 32 inputs (nibbles.h).
//
// Where a gate lies beside the weight whose products it multiplies, both of the same form, their panels take turns.
struct Form {
    explicit Form(int64_t number)
        : bits(number & 255), group(number >> 8 & 255), shifts(number >> 16 & 1), whole(number >> 17 & 1),
          weights(1 + (number >> 18 & 1)) {}

    // Whether numbers stand there as they are multiplied.
    bool numbers() const { return bits == 16 || (whole && bits == 8); }

    // Inputs that stand together: in front the scales and shifts of 32 outputs, then their codes.
    int64_t unit() const { return group > 32 ? group : 32; }

    // Inputs of a panel, with those that fill it up.
    int64_t filled(int64_t inputs) const { return whole ? (inputs + 63) / 64 * 64 : inputs; }

    // Bytes in front of a weight: the table.
    int64_t table() const { return whole && bits == 4 ? TABLE : 0; }

    // Bytes in front of the codes of 32 outputs: of whole numbers the scales, what is added to sums, and the factors.
    int64_t head(int64_t inputs) const {
        if (!whole) return 0;
        return SCALES + (bits == 4 ? (filled(inputs) / 64 * PANEL + 63) / 64 * 64 : 0);
    }

    // Bytes of `inputs` inputs of 32 outputs; `inputs` is a multiple of `unit`.
    int64_t bytes(int64_t inputs) const {
        return head(inputs) + filled(inputs) * PANEL * bits / 8 + (group ? inputs / group * PANEL * 2 * (1 + shifts) : 0);
    }

    static constexpr int64_t TABLE = 128, SCALES = 2 * PANEL * 4;
    int64_t bits, group, shifts, whole, weights;
};

// A weight [outputs, inputs] in panels of 32 outputs, the last one filled up with zeros; or a gate and a weight, each so.
struct Packed {
    const uint8_t* panel(int64_t number) const { return at + form.table() + number * form.bytes(inputs); }
    int64_t pieces() const { return (outputs + PANEL - 1) / PANEL; }  // all that there is of 32 outputs
    int64_t panels() const { return pieces() * form.weights; }
    int64_t bytes() const { return form.table() + panels() * form.bytes(inputs); }

    const uint8_t* at;
    int64_t outputs, inputs;
    Form form;
};

// Each writes all panels of `packed`, or, where two weights lie there, of the gate (0) or the other one (1), which is
// `which`. `inputs` is a multiple of 32 and of the group.
void pack(Team& team, const bf16* weight, const Packed& packed, int64_t which);
// Codes, scales and shifts (null if the form has none) as QuantizedWeight has them.
void pack_quantized(Team& team, const uint8_t* codes, const uint16_t* scales, const uint16_t* shifts,
                    const Packed& packed, int64_t which);
// Whole numbers: codes and one scale of each output; in 4 bits also factors [outputs, inputs / 32] and the table [8][16].
void pack_whole(Team& team, const uint8_t* codes, const uint16_t* scales, const uint8_t* factors, const int8_t* table,
                const Packed& packed, int64_t which);

}  // namespace tgi
