// Packs weights. See packed_weight.h.
//
// 32 inputs of a panel of 32 outputs are two tiles, one for 16 outputs each, in which numbers have the order of
// `element_index`: bfloat16 tiles are AMX tiles, whose row j has the inputs 2 j and 2 j + 1 of each output next to each
// other.
//
// Codes for the FMA engine: tiles of 8-bit codes [32][16]; row j of a tile of 4-bit codes, [16][16] bytes, has input 2 j
// of each output in the lower half of a byte and input 2 j + 1 in the upper half.
//
// Codes for the dot engine: 8-bit codes have the order of bfloat16. 4-bit codes are stored in groups of four rows, as 16
// words of 32 bits: word i has the eight codes that become lane i of eight vectors. Of row q, outputs 0 to 7 are in bits
// 8 q to 8 q + 3 of the words and outputs 8 to 15 in bits 8 q + 4 to 8 q + 7; lane i is input i % 2 of output i / 2.
// Integers for the dot engine are described at PackDotIntegers, 4-bit floats of mxfp4 at PackMxfp4Job.
#include "packed_weight.h"

#include <algorithm>
#include <cstring>

namespace tgi {
namespace {

constexpr int64_t TILE = 16;  // outputs of a tile

template <class T>
struct PackJob final : Job {
    PackJob(const void* weight, const PackedWeight& packed, int64_t part) : weight((const T*)weight), packed(packed),
        part(part) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, count = std::min(packed.outputs - first, PANEL), inputs = packed.inputs;
        auto* to = (T*)packed.panel(chunk * packed.form.weights + part);
        if (count < PANEL || inputs % 32) memset((void*)to, 0, packed.form.panel_bytes(inputs));
        for (int64_t from = 0; from < inputs; from += 32, to += 32 * PANEL)
            for (int64_t n = 0; n < count; n++)
                pack_output(weight + (first + n) * inputs + from, std::min<int64_t>(inputs - from, 32), n % TILE,
                    to + n / TILE * 32 * TILE);
    }

    // Up to 32 inputs of output n of a tile.
    static void pack_output(const T* from, int64_t count, int64_t n, T* tile) {
        if (count == 32)  // a constant count takes a third of the time
            for (int64_t k = 0; k < 32; k++) tile[element_index<T>(k, n, TILE)] = from[k];
        else
            for (int64_t k = 0; k < count; k++) tile[element_index<T>(k, n, TILE)] = from[k];
    }

    const T* weight;
    const PackedWeight packed;
    const int64_t part;
};

struct PackGroupedJob final : Job {
    PackGroupedJob(const uint8_t* codes, const void* scales, const void* shifts, const PackedWeight& packed,
        int64_t part)
        : codes(codes), scales((const uint8_t*)scales), shifts((const uint8_t*)shifts), packed(packed),
            form(packed.form), part(part) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, count = std::min(packed.outputs - first, PANEL), size = form.scale_bytes;
        auto* to = (uint8_t*)packed.panel(chunk * packed.form.weights + part);
        if (count < PANEL) memset(to, 0, form.panel_bytes(packed.inputs));
        for (int64_t from = 0; from < packed.inputs; from += form.unit()) {
            for (int64_t group = from; group < from + form.unit(); group += form.group)
                for (const uint8_t* column : {scales, shifts}) {
                    if (!column) continue;
                    const int64_t groups = packed.inputs / form.group;
                    for (int64_t n = 0; n < count; n++)
                        memcpy(to + size * n, column + size * ((first + n) * groups + group / form.group), size);
                    to += size * PANEL;
                }
            for (int64_t k = from; k < from + form.unit(); k += 32)
                for (int64_t n = 0; n < PANEL; n += TILE, to += TILE * 4 * form.bits)
                    if (form.bits == 8) eight_bit_tile(first + n, std::min(count - n, TILE), k, to);
                    else four_bit_tile(first + n, std::min(count - n, TILE), k, to);
        }
    }

    // 8-bit codes of 32 inputs.
    void eight_bit_tile(int64_t first, int64_t count, int64_t k, uint8_t* to) const {
        for (int64_t n = 0; n < count; n++)
            for (int64_t i = 0; i < 32; i++)
                to[element_index<Operand>(i, n, TILE)] = codes[(first + n) * packed.inputs + k + i];
    }

    // 4-bit codes of 32 inputs.
    void four_bit_tile(int64_t first, int64_t count, int64_t k, uint8_t* to) const {
#if TGI_DOT_ENGINE
        for (int64_t rows = 0; rows < TILE; rows += 4, to += TILE * 4) {
            uint32_t each[TILE] = {};  // eight codes of each output, for consecutive inputs
            for (int64_t n = 0; n < count; n++)
                memcpy(&each[n], codes + ((first + n) * packed.inputs + k) / 2 + rows, 4);
            for (int64_t i = 0; i < TILE; i++) {
                const uint32_t left = each[i / 2] >> i % 2 * 4, right = each[8 + i / 2] >> i % 2 * 4;
                const uint32_t word = (left & 0x0f0f0f0f) | (right & 0x0f0f0f0f) << 4;
                memcpy(to + 4 * i, &word, 4);
            }
        }
#else
        for (int64_t n = 0; n < count; n++)
            for (int64_t j = 0; j < 16; j++) to[j * TILE + n] = codes[((first + n) * packed.inputs + k) / 2 + j];
#endif
    }

    const uint8_t *codes, *scales, *shifts;
    const PackedWeight packed;
    const WeightFormat form;
    const int64_t part;
};

// 4-bit floats in groups of 32 with powers of two as scales. First the scales of all groups, each the exponent of a
// float32 number; then the codes of 32 inputs after the other, in 8 rows of 64 bytes: byte 4 n + i of row j has input
// 4 j + i of output n in its lower half and of output 16 + n in its upper half. Groups with scales below LEAST are zeros.
struct PackMxfp4Job final : Job {
    PackMxfp4Job(const uint8_t* codes, const void* scales, const PackedWeight& packed, int64_t part)
        : codes(codes), scales(scales), packed(packed), part(part) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, count = std::min(packed.outputs - first, PANEL), inputs = packed.inputs;
        auto* const at = (uint8_t*)packed.panel(chunk * packed.form.weights + part);
        memset(at, 0, packed.form.panel_bytes(inputs));
        memset(at, ONE, inputs / 32 * PANEL);
        for (int64_t n = 0; n < count; n++)
            for (int64_t group = 0; group < inputs / 32; group++) {
                const int64_t number = (first + n) * (inputs / 32) + group;
                const float scale = packed.form.scale_bytes == 4 ? ((const float*)scales)[number]
                                                                 : to_float(((const f16*)scales)[number]);
                if (scale < LEAST) continue;
                uint32_t bits;
                memcpy(&bits, &scale, sizeof bits);
                at[group * PANEL + n] = bits >> 23;
                uint8_t* const to = at + packed.form.header_bytes(inputs) + group * 512 + n % TILE * 4;
                for (int64_t i = 0; i < 32; i++) {
                    const int code = codes[number * 16 + i / 2] >> i % 2 * 4 & 15;
                    to[i / 4 * 64 + i % 4] |= code << n / TILE * 4;
                }
            }
    }

    static constexpr float LEAST = 0x1p-41f;
    static constexpr int ONE = 127;  // the exponent of 1
    const uint8_t* codes;
    const void* scales;
    const PackedWeight packed;
    const int64_t part;
};

#if TGI_DOT_ENGINE

// Integers are packed 64 inputs at a time. Row j of a tile has the inputs 4 j to 4 j + 3 of each output next to each
// other: 8-bit numbers as such, 4-bit codes with those of the other tile in the upper halves of the bytes. Before them
// are the scales of the outputs (float32), the corrections of the sums of upper bytes (int32), and the factors: one
// byte of each output for 64 inputs, with the factor of the first 32 in its lower half.
struct PackDotIntegers final : Job {
    PackDotIntegers(const uint8_t* codes, const f16* scales, const uint8_t* factors, const int8_t* table,
        const PackedWeight& packed,
             int64_t part)
        : codes(codes), scales(scales), factors(factors), table(table), packed(packed), part(part) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, count = std::min(packed.outputs - first, PANEL), inputs = packed.inputs;
        auto* const at = (uint8_t*)packed.panel(chunk * packed.form.weights + part);
        memset(at, 0, packed.form.panel_bytes(inputs));
        auto* const to = at + packed.form.header_bytes(inputs);
        if (packed.form.bits == 4) memset(to, ZERO << 4 | ZERO, packed.form.padded_inputs(inputs) * PANEL / 2);
        for (int64_t n = 0; n < count; n++) {
            const bool eight = packed.form.bits == 8;
            const int64_t sum = eight ? eight_bit_output(first + n, n, to) : four_bit_output(first + n, n,
                at + 2 * WeightFormat::SCALES, to);
            ((float*)at)[n] = to_float(scales[first + n]);
            ((int32_t*)at)[PANEL + n] = -128 * sum;
        }
    }

    // Each packs output n of a panel and returns the sum of its numbers.
    int64_t eight_bit_output(int64_t output, int64_t n, uint8_t* to) const {
        const auto* from = (const int8_t*)codes + output * packed.inputs;
        int32_t sum = 0;
        for (int64_t k = 0; k < packed.inputs; k++) sum += from[k];
        for (int64_t k = 0; k < packed.inputs; k += 4)
            memcpy(to + k / 64 * 2048 + n / TILE * 1024 + k % 64 * TILE + n % TILE * 4, from + k, 4);
        return sum;
    }

    int64_t four_bit_output(int64_t output, int64_t n, uint8_t* its_factors, uint8_t* to) const {
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
        for (int64_t k = 0; k < packed.inputs; k += 32) its_factors[k / 64 * PANEL +
            n] |= factor[k / 32] << k % 64 / 32 * 4;
        return sum;
    }

    static constexpr uint8_t ZERO = 8;  // the 4-bit code of 0 for every factor
    const uint8_t* codes;
    const f16* scales;
    const uint8_t* factors;
    const int8_t* table;
    const PackedWeight packed;
    const int64_t part;
};

using PackIntegerJob = PackDotIntegers;

#else

// Integers for the FMA engine: the scales of the outputs (float32), then for each 32 inputs, with 4 bits, the factors of
// the outputs, a byte each, and two tiles of codes.
struct PackIntegerJob final : Job {
    PackIntegerJob(const uint8_t* codes, const f16* scales, const uint8_t* factors, const int8_t*,
        const PackedWeight& packed, int64_t part)
        : codes(codes), scales(scales), factors(factors), packed(packed), part(part) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * PANEL, count = std::min(packed.outputs - first, PANEL), inputs = packed.inputs;
        auto* const at = (uint8_t*)packed.panel(chunk * packed.form.weights + part);
        const int64_t bits = packed.form.bits, factor_bytes = packed.form.factor_bytes();
        const int64_t block_bytes = factor_bytes + 32 * PANEL * bits / 8;
        memset(at, 0, packed.form.panel_bytes(inputs));
        for (int64_t n = 0; n < count; n++) {
            ((float*)at)[n] = to_float(scales[first + n]);
            uint8_t* block = at + packed.form.header_bytes(inputs);
            for (int64_t from = 0; from < inputs; from += 32, block += block_bytes) {
                const int64_t number = (first + n) * inputs + from;
                if (bits == 4) block[n] = factors[number / 32];
                uint8_t* const tile = block + factor_bytes + n / TILE * TILE * 4 * bits + n % TILE;
                for (int64_t k = 0; k < std::min<int64_t>(inputs - from, 32); k += bits == 4 ? 2 : 1)
                    tile[(bits == 4 ? k / 2 : k) * TILE] = codes[bits == 4 ? (number + k) / 2 : number + k];
            }
        }
    }

    const uint8_t* codes;
    const f16* scales;
    const uint8_t* factors;
    const PackedWeight packed;
    const int64_t part;
};

#endif

}  // namespace

void pack(ThreadPool& pool, const void* weight, const PackedWeight& packed, int64_t part) {
    const int64_t chunks = packed.output_blocks();
    if (packed.form.bits == 32) pool.run(PackJob<float>(weight, packed, part), chunks);
    else if (packed.form.half) pool.run(PackJob<f16>(weight, packed, part), chunks);
    else pool.run(PackJob<bf16>(weight, packed, part), chunks);
}

void pack_grouped(ThreadPool& pool, const uint8_t* codes, const void* scales, const void* shifts,
    const PackedWeight& packed, int64_t part) {
    if (packed.form.mxfp4) return pool.run(PackMxfp4Job(codes, scales, packed, part), packed.output_blocks());
    pool.run(PackGroupedJob(codes, scales, shifts, packed, part), packed.output_blocks());
}

void pack_integer(ThreadPool& pool, const uint8_t* codes, const f16* scales, const uint8_t* factors,
    const int8_t* table, const PackedWeight& packed, int64_t part) {
    if (packed.form.table_bytes()) memcpy((uint8_t*)packed.at, table, WeightFormat::TABLE);
    pool.run(PackIntegerJob(codes, scales, factors, table, packed, part), packed.output_blocks());
}

}  // namespace tgi
