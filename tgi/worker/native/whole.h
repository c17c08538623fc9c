// Products of whole numbers, which are exact: y = unit of the row * scale of the output * sum of products.
//
// Weights are whole numbers of 8 bits times a scale for each output. Activations of a row become whole numbers of 16 bits
// times a unit for each row, the largest being 32767 units; their upper and lower bytes are multiplied apart. So sums do
// not depend on their order, and whatever computes them finds the same.
#pragma once
#include <cstring>
#include <limits>
#include <vector>

#include "linear.h"
#include "product.h"

namespace tgi {

// The whole numbers of rows, 32768 added so that none is negative: [2][rows][step] pairs of bytes, first the upper ones.
struct Planes {
    Rows rows(int64_t row, int64_t count) const { return {at + row * step, step, count, count, apart}; }

    const bf16* at;
    const float* units;  // [rows]
    int64_t step, apart;
};

constexpr int64_t HALF = 1 << 15;  // what is added

struct PlanesJob final : Job {
    PlanesJob(const bf16* x, uint8_t* upper, uint8_t* lower, float* units, int64_t rows, int64_t inputs, int64_t step)
        : x(x), upper(upper), lower(lower), units(units), rows(rows), inputs(inputs), step(step) {}

    int64_t chunks() const { return rows <= FEW ? 1 : (rows + SHARE - 1) / SHARE; }

    void run(int64_t chunk) const override {
        const int64_t share = rows <= FEW ? rows : SHARE, last = std::min((chunk + 1) * share, rows);
        for (int64_t row = chunk * share; row < last; row++)
            units[row] = one(x + row * inputs, upper + row * step, lower + row * step);
    }

  private:
    // A row. Returns its unit: 0 for a row of zeros, no number where there is one that is none, or is infinite.
    float one(const bf16* from, uint8_t* high, uint8_t* low) const {
        __m512i most = _mm512_setzero_si512();  // magnitudes of bfloat16 are ordered like their bits
        for (int64_t k = 0; k < inputs; k += 32)
            most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(from + k), _mm512_set1_epi16(0x7fff)));
        const __m512i wide = _mm512_max_epu32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xffff)));
        const uint32_t bits = _mm512_reduce_max_epu32(wide) << 16;
        float largest;
        memcpy(&largest, &bits, 4);
        const bool finite = bits < 0x7f800000;
        const __m512 per_unit = _mm512_set1_ps(finite && largest > LEAST ? (HALF - 1) / largest : 0.f);
        for (int64_t k = 0; k < inputs; k += 32) {
            const __m512i both = _mm512_loadu_si512(from + k), half = _mm512_set1_epi32(HALF);
            const auto number = [&](__m512i x) {
                return _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(x), per_unit)), half);
            };
            const __m512i even = number(_mm512_slli_epi32(both, 16));
            const __m512i odd = number(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
            const __m512i numbers = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
            _mm256_storeu_si256((__m256i*)(high + k), _mm512_cvtepi16_epi8(_mm512_srli_epi16(numbers, 8)));
            _mm256_storeu_si256((__m256i*)(low + k), _mm512_cvtepi16_epi8(numbers));
        }
        return !finite ? std::numeric_limits<float>::quiet_NaN() : largest > LEAST ? largest / (HALF - 1) : 0.f;
    }

    static constexpr int64_t FEW = 8, SHARE = 16;  // rows that one thread goes through, and those of a chunk
    static constexpr float LEAST = 0x1p-100f;
    const bf16* x;
    uint8_t *upper, *lower;
    float* units;
    const int64_t rows, inputs, step;
};

inline Planes planes(Team& team, const LinearCall& call) {
    struct alignas(LINE) Line {
        uint8_t bytes[LINE];
    };
    static thread_local std::vector<Line> lines;
    static thread_local std::vector<float> units;
    const int64_t step = call.weight.form.filled(call.weight.inputs);
    if ((int64_t)lines.size() * LINE < 2 * call.rows * step) lines.resize(2 * call.rows * step / LINE);
    uint8_t* const bytes = lines[0].bytes;
    if ((int64_t)units.size() < call.rows) units.resize(call.rows);
    const PlanesJob job(call.x, bytes, bytes + call.rows * step, units.data(), call.rows, call.weight.inputs, step);
    team.run(job, job.chunks());
    return {(const bf16*)bytes, units.data(), step / 2, call.rows * step / 2};
}

// Sums [rows][32] of upper and, `apart` behind them, of lower bytes. Adding 32768 to the activations has added 32768 times
// the sum of an output's numbers, which is taken off again.
struct WholeSums {
    WholeSums() = default;
    WholeSums(const int32_t* at, int64_t apart, const float* units, const uint8_t* panel)
        : at(at), apart(apart), units(units), scales((const float*)panel), offsets((const int32_t*)panel + PANEL) {}

    __m512 of(int half) const {
        const __m512i upper = _mm512_add_epi32(_mm512_loadu_si512(at + 16 * half), _mm512_loadu_si512(offsets + 16 * half));
        const __m512 lower = _mm512_cvtepi32_ps(_mm512_loadu_si512(at + apart + 16 * half));
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper), _mm512_set1_ps(256.f), lower);
        return _mm512_mul_ps(_mm512_mul_ps(sum, _mm512_loadu_ps(scales + 16 * half)), _mm512_set1_ps(*units));
    }

    void next(int64_t rows) { at += rows * COLUMNS, units += rows; }

    const int32_t* at;
    int64_t apart;
    const float *units, *scales;
    const int32_t* offsets;
};

// What codes of 4 bits stand for, 64 inputs at a time: row by row, or in memory.
class Nibbles {
  public:
    static constexpr int64_t step = 32, right = 512;  // as `tiled` columns

    Nibbles(const Packed& weight, const uint8_t* panel, int64_t from)
        : choices_(panel + 2 * 4 * PANEL + from / 64 * PANEL), at_(panel + weight.form.head(weight.inputs) + from / 64 * BLOCK_BYTES),
          first_(_mm512_loadu_si512(weight.at)), second_(_mm512_loadu_si512(weight.at + 64)) {}

    const bf16* block() {
        next(room_);
        return room_;
    }

    inline void next(bf16* to);

  private:
    friend struct Block<Nibbles>;
    static constexpr int64_t BLOCK_BYTES = 1024;

    const uint8_t *choices_, *at_;
    const __m512i first_, second_;
    alignas(64) bf16 room_[1024];
};

template <>
struct Block<Nibbles> {
    explicit Block(Nibbles& all) : at(all.at_), low(all.first_), high(all.second_) {
        for (int64_t line = 0; line < Nibbles::BLOCK_BYTES; line += LINE) soon(at + AHEAD + line);
        const __m512i each = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)all.choices_));
        const __m512i fourth = _mm512_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303, 0x04040404, 0x05050505, 0x06060606,
                                                 0x07070707, 0x08080808, 0x09090909, 0x0a0a0a0a, 0x0b0b0b0b, 0x0c0c0c0c,
                                                 0x0d0d0d0d, 0x0e0e0e0e, 0x0f0f0f0f);
        const __m512i choice = _mm512_set1_epi8(0x70);
        for (int side = 0; side < 2; side++) {
            const __m512i both = _mm512_permutexvar_epi8(_mm512_add_epi8(fourth, _mm512_set1_epi8(16 * side)), each);
            choices[side][0] = _mm512_and_si512(_mm512_slli_epi16(both, 4), choice);
            choices[side][1] = _mm512_and_si512(both, choice);
        }
        all.at_ += Nibbles::BLOCK_BYTES, all.choices_ += PANEL;
    }

    __m512i first(int row) const { return number(_mm512_loadu_si512(at + 64 * row), choices[0][row / 8]); }
    __m512i second(int row) const { return number(_mm512_srli_epi16(_mm512_loadu_si512(at + 64 * row), 4), choices[1][row / 8]); }

  private:
    __m512i number(__m512i codes, __m512i choice) const {
        constexpr int EITHER = 0xea;  // a & b | c
        return _mm512_permutex2var_epi8(low, _mm512_ternarylogic_epi64(codes, _mm512_set1_epi8(0x0f), choice, EITHER), high);
    }

    const uint8_t* at;
    const __m512i low, high;
    __m512i choices[2][2];
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
