// What becomes of a product's sums: bias, what adapters add, `then`, and the rounding to where they go.
#pragma once
#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "product.h"

namespace tgi {

inline __m512 score(__m512 sum, const Scoring& how) {
    const __m512 scaled = _mm512_mul_ps(sum, _mm512_set1_ps(how.scale));
    return how.cap ? _mm512_mul_ps(tanh(_mm512_mul_ps(scaled, _mm512_set1_ps(1 / how.cap))), _mm512_set1_ps(how.cap)) : scaled;
}

// Sums [rows][32] as they are computed.
struct Sums {
    __m512 of(int half) const { return _mm512_load_ps(at + 16 * half); }
    void next(int64_t rows) { at += rows * COLUMNS; }

    const float* at;
};

// The sums of some rows from `first` on, for the outputs from `at` on.
template <Then then, class Found>
void finish(const LinearCall& call, int64_t first, int64_t rows, int64_t at, Found sums) {
    const int64_t outputs = call.weight.outputs, left = std::min(outputs - at, PANEL);
    const __mmask32 all = (1ull << left) - 1;
    const __mmask16 there[2] = {(__mmask16)all, (__mmask16)(all >> 16)};
    __m512 bias[2] = {};
    for (int half = 0; call.bias && half < 2; half++)
        bias[half] = _mm512_maskz_loadu_ps(there[half], call.bias + at + 16 * half);
    for (int64_t row = first; row < first + rows; row++, sums.next(1)) {
        const int64_t to = row * outputs + at;
        __m512 y[2];
        for (int half = 0; half < 2; half++) {
            y[half] = sums.of(half);
            if (call.bias) y[half] = _mm512_add_ps(y[half], bias[half]);
            if (call.plus) {
                const float* plus = call.plus + row * call.plus_step + at + 16 * half;
                y[half] = _mm512_add_ps(y[half], _mm512_maskz_loadu_ps(there[half], plus));
            }
            if (then == Then::silu) y[half] = silu(y[half]);
            if (then == Then::gelu) y[half] = gelu(y[half]);
            if (then == Then::gelu_tanh) y[half] = gelu_tanh(y[half]);
            if (then == Then::score) y[half] = score(y[half], call.scoring);
            if (then == Then::add || then == Then::mul) {
                const __m256i bits = _mm256_maskz_loadu_epi16(there[half], call.other + to + 16 * half);
                const __m512 other = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
                y[half] = then == Then::add ? _mm512_add_ps(y[half], other) : _mm512_mul_ps(y[half], other);
            }
            if (call.wide) _mm512_mask_storeu_ps(call.wide + to + 16 * half, there[half], y[half]);
        }
        if (call.peaks) {
            for (int half = 0; half < 2; half++) y[half] = _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), there[half], y[half]);
            call.peaks->put(row, at / PANEL, y[0], y[1]);
        } else if (!call.wide) _mm512_mask_storeu_epi16(call.y + to, all, (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]));
    }
}

// Calls `use` with `then` as a constant.
template <class Use>
inline void with_then(Then then, const Use& use) {
    switch (then) {
        case Then::none: return use(std::integral_constant<Then, Then::none>());
        case Then::silu: return use(std::integral_constant<Then, Then::silu>());
        case Then::gelu: return use(std::integral_constant<Then, Then::gelu>());
        case Then::gelu_tanh: return use(std::integral_constant<Then, Then::gelu_tanh>());
        case Then::add: return use(std::integral_constant<Then, Then::add>());
        case Then::mul: return use(std::integral_constant<Then, Then::mul>());
        case Then::score: return use(std::integral_constant<Then, Then::score>());
    }
}

template <class Found>
inline void finish(const LinearCall& call, int64_t first, int64_t rows, int64_t at, const Found& sums) {
    with_then(call.then, [&](auto then) { finish<then>(call, first, rows, at, sums); });
}

// Sums that are finished a few rows at a time, while the next ones are computed; by `then` or, behind a gate, by mul.
template <Then then, class Found>
class Unfinished {
  public:
    // What `finish` takes; nothing may be left of what was put before. Asks for what is to be added or multiplied: its rows
    // are far apart, and a large prompt's come from memory.
    void put(const LinearCall& call, int64_t first, int64_t rows, int64_t at, const Found& sums) {
        call_ = &call, first_ = first, rows_ = rows, at_ = at, sums_ = sums;
        if (call.then != Then::add && call.then != Then::mul) return;
        for (int64_t row = first; row < first + rows; row++)
            soon((const uint8_t*)(call.other + row * call.weight.outputs + at));
    }

    void some(int64_t most) {
        const int64_t rows = std::min(most, rows_);
        if (rows == 0) return;
        if (call_->then == then) finish<then>(*call_, first_, rows, at_, sums_);
        else finish<Then::mul>(*call_, first_, rows, at_, sums_);
        first_ += rows, rows_ -= rows, sums_.next(rows);
    }

    void rest() { some(rows_); }

  private:
    const LinearCall* call_ = nullptr;
    int64_t first_ = 0, rows_ = 0, at_ = 0;
    Found sums_{};
};

}  // namespace tgi
