// Brings weights into the order in which they are read. See packed.h.
//
// 32 inputs of a panel of 32 outputs are two AMX tiles, one of 16 outputs after the other. Row j of a tile has the inputs
// 2 j and 2 j + 1 of each output side by side. Codes lie as the numbers would: codes of 8 bits in the same order, codes of
// 4 bits in groups of four rows, as 16 words of which lane i has the eight codes that become lane i of eight
// vectors: of row q, outputs 0 to 7 are in bits 8 q to 8 q + 3 of each word and outputs 8 to 15 in bits 8 q + 4 to 8 q + 7,
// lane i being input i % 2 of output i / 2.
#include "packed.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace tgi {
namespace {

constexpr int64_t TILE = 16;  // outputs of an AMX tile, and pairs of inputs

struct PackJob final : Job {
    PackJob(const bf16* weight, const Packed& packed, int64_t which) : weight(weight), packed(packed), which(which) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, there = std::min(packed.outputs - first, PANEL), inputs = packed.inputs;
        auto* to = (bf16*)packed.panel(chunk * packed.form.weights + which);
        if (there < PANEL) memset(to, 0, packed.form.bytes(inputs));
        for (int64_t from = 0; from < inputs; from += 32, to += 32 * PANEL)
            for (int64_t n = 0; n < there; n++)
                for (int64_t j = 0; j < TILE; j++)
                    memcpy(to + n / TILE * 512 + j * 32 + n % TILE * 2, weight + (first + n) * inputs + from + 2 * j, 4);
    }

    const bf16* weight;
    const Packed packed;
    const int64_t which;
};

struct QuantizedJob final : Job {
    QuantizedJob(const uint8_t* codes, const uint16_t* scales, const uint16_t* shifts, const Packed& packed, int64_t which)
        : codes(codes), scales(scales), shifts(shifts), packed(packed), form(packed.form), which(which) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, there = std::min(packed.outputs - first, PANEL);
        auto* to = (uint8_t*)packed.panel(chunk * packed.form.weights + which);
        if (there < PANEL) memset(to, 0, form.bytes(packed.inputs));
        for (int64_t from = 0; from < packed.inputs; from += form.unit()) {
            for (int64_t group = from; group < from + form.unit(); group += form.group)
                for (const uint16_t* column : {scales, shifts}) {
                    if (!column) continue;
                    const int64_t groups = packed.inputs / form.group;
                    for (int64_t n = 0; n < there; n++)
                        memcpy(to + 2 * n, column + (first + n) * groups + group / form.group, 2);
                    to += 2 * PANEL;
                }
            for (int64_t k = from; k < from + form.unit(); k += 32)
                for (int64_t n = 0; n < PANEL; n += TILE, to += TILE * 4 * form.bits)
                    if (form.bits == 8) tile(first + n, std::min(there - n, TILE), k, to);
                    else small_tile(first + n, std::min(there - n, TILE), k, (uint32_t*)to);
        }
    }

    // Codes of 8 bits of 32 inputs of some outputs.
    void tile(int64_t first, int64_t there, int64_t k, uint8_t* to) const {
        for (int64_t n = 0; n < there; n++)
            for (int64_t j = 0; j < TILE; j++)
                memcpy(to + j * 2 * TILE + 2 * n, codes + (first + n) * packed.inputs + k + 2 * j, 2);
    }

    // Codes of 4 bits.
    void small_tile(int64_t first, int64_t there, int64_t k, uint32_t* to) const {
        for (int64_t rows = 0; rows < TILE; rows += 4, to += TILE) {
            uint32_t each[TILE] = {};  // eight codes of each output, one input after the other
            for (int64_t n = 0; n < there; n++)
                memcpy(&each[n], codes + ((first + n) * packed.inputs + k) / 2 + rows, 4);
            for (int64_t i = 0; i < TILE; i++) {
                const uint32_t left = each[i / 2] >> i % 2 * 4, right = each[8 + i / 2] >> i % 2 * 4;
                to[i] = (left & 0x0f0f0f0f) | (right & 0x0f0f0f0f) << 4;
            }
        }
    }

    const uint8_t* codes;
    const uint16_t *scales, *shifts;
    const Packed packed;
    const Form form;
    const int64_t which;
};

// Whole numbers, 64 inputs at a time. Row j of a tile has the inputs 4 j to 4 j + 3 of each output side by side; numbers of
// 8 bits lie so, codes of 4 bits with those of the other tile in their upper halves. In front are the outputs' scales
// (float32), what is to be added to sums of upper bytes (int32), and factors: a byte of each output for 64 inputs, the
// factor of the first 32 in its lower half.
struct WholeJob final : Job {
    WholeJob(const uint8_t* codes, const uint16_t* scales, const uint8_t* factors, const int8_t* table, const Packed& packed,
             int64_t which)
        : codes(codes), scales(scales), factors(factors), table(table), packed(packed), which(which) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, there = std::min(packed.outputs - first, PANEL), inputs = packed.inputs;
        auto* const at = (uint8_t*)packed.panel(chunk * packed.form.weights + which);
        memset(at, 0, packed.form.bytes(inputs));
        auto* const to = at + packed.form.head(inputs);
        if (packed.form.bits == 4) memset(to, ZERO << 4 | ZERO, packed.form.filled(inputs) * PANEL / 2);
        for (int64_t n = 0; n < there; n++) {
            const bool eight = packed.form.bits == 8;
            const int64_t sum = eight ? wide(first + n, n, to) : narrow(first + n, n, at + Form::SCALES, to);
            ((float*)at)[n] = _cvtsh_ss(scales[first + n]);
            ((int32_t*)at)[PANEL + n] = -128 * sum;
        }
    }

    // Each writes the output that is the n-th of its panel, and returns the sum of its numbers.
    int64_t wide(int64_t output, int64_t n, uint8_t* to) const {
        const auto* from = (const int8_t*)codes + output * packed.inputs;
        int32_t sum = 0;
        for (int64_t k = 0; k < packed.inputs; k++) sum += from[k];
        for (int64_t k = 0; k < packed.inputs; k += 4)
            memcpy(to + k / 64 * 2048 + n / TILE * 1024 + k % 64 * TILE + n % TILE * 4, from + k, 4);
        return sum;
    }

    int64_t narrow(int64_t output, int64_t n, uint8_t* its_factors, uint8_t* to) const {
        const uint8_t *from = codes + output * packed.inputs / 2, *factor = factors + output * packed.inputs / 32;
        const int64_t shift = n / TILE * 4;
        int32_t sum = 0;
        for (int64_t k = 0; k < packed.inputs; k += 2, from++) {
            const int8_t* numbers = table + factor[k / 32] * 16;
            const uint8_t low = *from & 15, high = *from >> 4;
            sum += numbers[low] + numbers[high];
            uint8_t* at = to + k / 64 * 1024 + k % 64 / 4 * 64 + n % TILE * 4 + k % 4;
            at[0] ^= (low ^ ZERO) << shift, at[1] ^= (high ^ ZERO) << shift;
        }
        for (int64_t k = 0; k < packed.inputs; k += 32) its_factors[k / 64 * PANEL + n] |= factor[k / 32] << k % 64 / 32 * 4;
        return sum;
    }

    static constexpr uint8_t ZERO = 8;  // the code of 4 bits that stands for 0, by any factor
    const uint8_t* codes;
    const uint16_t* scales;
    const uint8_t* factors;
    const int8_t* table;
    const Packed packed;
    const int64_t which;
};

}  // namespace

void pack(Team& team, const bf16* weight, const Packed& packed, int64_t which) {
    team.run(PackJob(weight, packed, which), packed.pieces());
}

void pack_quantized(Team& team, const uint8_t* codes, const uint16_t* scales, const uint16_t* shifts,
                    const Packed& packed, int64_t which) {
    team.run(QuantizedJob(codes, scales, shifts, packed, which), packed.pieces());
}

void pack_whole(Team& team, const uint8_t* codes, const uint16_t* scales, const uint8_t* factors, const int8_t* table,
                const Packed& packed, int64_t which) {
    if (packed.form.table()) memcpy((uint8_t*)packed.at, table, Form::TABLE);
    team.run(WholeJob(codes, scales, factors, table, packed, which), packed.pieces());
}

}  // namespace tgi
