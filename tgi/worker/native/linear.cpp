// Matrix products with weights that were packed once: y = then(x w^T + plus + bias).
//
// A weight [outputs, inputs] is packed as [outputs / 64][inputs / 2][64][2]: what 64 outputs need is one stream, read
// from end to end, in the order in which both AMX tiles and AVX-512 dot products of pairs take it. Outputs are filled up
// with zeros to whole blocks; inputs are a multiple of 32. A row's sums run over the inputs in the same order however
// many rows there are, so its result depends on nothing but the row.
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "product.h"

namespace tgi {
namespace {

constexpr int64_t WIDTH = 64;  // outputs of a block
constexpr int64_t ROWS = 256;  // rows that one chunk computes: they stay in the core's second cache

// What becomes of the sums of one row, 16 outputs at a time, from output `at` on.
template <Then then>
inline void finish(const LinearCall& call, int64_t row, int64_t at, __m512 y) {
    const int64_t left = call.outputs - at;
    if (left <= 0) return;
    const __mmask16 there = left >= 16 ? 0xffff : (1u << left) - 1;
    if (call.bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, call.bias + at));
    if (call.plus) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, call.plus + row * call.plus_step + at));
    if (then == Then::silu) y = silu(y);
    if (then == Then::gelu) y = gelu(y);
    if (then == Then::gelu_tanh) y = gelu_tanh(y);
    if (then == Then::add || then == Then::mul) {
        const __m256i half = _mm256_maskz_loadu_epi16(there, call.other + row * call.outputs + at);
        const __m512 other = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        y = then == Then::add ? _mm512_add_ps(y, other) : _mm512_mul_ps(y, other);
    }
    const int64_t to = row * call.outputs + at;
    if (call.wide) _mm512_mask_storeu_ps(call.wide + to, there, y);
    else _mm256_mask_storeu_epi16(call.y + to, there, (__m256i)_mm512_cvtneps_pbh(y));
}

template <Then then>
void block(const LinearCall& call, int64_t row, int64_t rows, int64_t at, const bf16* w) {
    alignas(64) float sums[MOST_ROWS][COLUMNS];
    for (int64_t half = 0; half < WIDTH && at + half < call.outputs; half += COLUMNS)
        for (int64_t done = 0; done < rows; done += MOST_ROWS) {
            const int64_t count = std::min(rows - done, MOST_ROWS);
            if (done == 0 || count < MOST_ROWS) prepare(count);
            const bf16* x = call.x + (row + done) * call.inputs;
            product(x, call.inputs, count, w + 2 * half, WIDTH, call.inputs, sums[0], COLUMNS);
            for (int64_t r = 0; r < count; r++)
                for (int64_t n = 0; n < COLUMNS; n += 16)
                    finish<then>(call, row + done + r, at + half + n, _mm512_load_ps(sums[r] + n));
        }
}

struct LinearJob final : Job {
    explicit LinearJob(const LinearCall& call) : call(call), blocks((call.outputs + WIDTH - 1) / WIDTH) {}

    int64_t chunks() const { return blocks * ((call.rows + ROWS - 1) / ROWS); }

    void run(int64_t chunk) const override {
        const int64_t row = chunk / blocks * ROWS, at = chunk % blocks * WIDTH;
        const int64_t rows = std::min(call.rows - row, ROWS);
        const bf16* w = call.weight + at * call.inputs;
        switch (call.then) {
            case Then::none: return block<Then::none>(call, row, rows, at, w);
            case Then::silu: return block<Then::silu>(call, row, rows, at, w);
            case Then::gelu: return block<Then::gelu>(call, row, rows, at, w);
            case Then::gelu_tanh: return block<Then::gelu_tanh>(call, row, rows, at, w);
            case Then::add: return block<Then::add>(call, row, rows, at, w);
            case Then::mul: return block<Then::mul>(call, row, rows, at, w);
        }
    }

    const LinearCall call;
    const int64_t blocks;
};

}  // namespace

void linear(Team& team, const LinearCall& call) {
    const LinearJob job(call);
    team.run(job, job.chunks());
}

namespace {

struct PackJob final : Job {
    PackJob(const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed)
        : weight(weight), outputs(outputs), inputs(inputs), packed(packed) {}

    void run(int64_t chunk) const override {
        const int64_t at = chunk * WIDTH, there = std::min(outputs - at, WIDTH);
        bf16* to = packed + at * inputs;
        if (there < WIDTH) memset(to, 0, WIDTH * inputs * sizeof(bf16));
        // A cache line of each row at a time.
        for (int64_t from = 0; from < inputs; from += 32)
            for (int64_t n = 0; n < there; n++)
                for (int64_t k = from; k < from + 32; k += 2)
                    memcpy(to + k * WIDTH + 2 * n, weight + (at + n) * inputs + k, 2 * sizeof(bf16));
    }

    const bf16* weight;
    const int64_t outputs, inputs;
    bf16* packed;
};

}  // namespace

void pack(Team& team, const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed) {
    team.run(PackJob(weight, outputs, inputs, packed), (outputs + WIDTH - 1) / WIDTH);
}

}  // namespace tgi
