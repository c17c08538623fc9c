// The epilogue of a matrix product: bias, LoRA sums, activation or other operation, and rounding to the output type.
#pragma once
#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "tile_matmul.h"

namespace tgi {

inline __m512 to_logit(__m512 sum, const LogitScale& how) {
    const __m512 scaled = _mm512_mul_ps(sum, _mm512_set1_ps(how.scale));
    return how.cap ? _mm512_mul_ps(tanh(_mm512_mul_ps(scaled, _mm512_set1_ps(1 / how.cap))),
        _mm512_set1_ps(how.cap)) : scaled;
}

// Reads float32 sums [rows][32].
struct FloatSums {
    __m512 of(int half) const { return _mm512_load_ps(at + 16 * half); }
    void next(int64_t rows) { at += rows * COLUMNS; }

    const float* at;
};

// Applies the epilogue to the sums of rows from `first` on, for the outputs from `at` on.
template <Epilogue epilogue, class SumReader>
void apply_epilogue(const LinearCall& call, int64_t first, int64_t rows, int64_t at, SumReader sums) {
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
            if (epilogue == Epilogue::silu) y[half] = silu(y[half]);
            if (epilogue == Epilogue::gelu) y[half] = gelu(y[half]);
            if (epilogue == Epilogue::gelu_tanh) y[half] = gelu_tanh(y[half]);
            if (epilogue == Epilogue::logit) y[half] = to_logit(y[half], call.logit_scale);
            if (epilogue == Epilogue::add || epilogue == Epilogue::mul) {
                const __m256i bits = _mm256_maskz_loadu_epi16(there[half], call.other + to + 16 * half);
                const __m512 other = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
                y[half] = epilogue == Epilogue::add ? _mm512_add_ps(y[half], other) : _mm512_mul_ps(y[half], other);
            }
            if (call.wide) _mm512_mask_storeu_ps(call.wide + to + 16 * half, there[half], y[half]);
        }
        if (call.block_maxima) {
            for (int half = 0; half < 2; half++) y[half] = _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), there[half],
                y[half]);
            call.block_maxima->set(row, at / PANEL, y[0], y[1]);
        } else if (!call.wide) _mm512_mask_storeu_epi16(call.y + to, all, (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]));
    }
}

// Calls `use` with the epilogue as a compile-time constant.
template <class Use>
inline void with_epilogue(Epilogue epilogue, const Use& use) {
    switch (epilogue) {
        case Epilogue::none: return use(std::integral_constant<Epilogue, Epilogue::none>());
        case Epilogue::silu: return use(std::integral_constant<Epilogue, Epilogue::silu>());
        case Epilogue::gelu: return use(std::integral_constant<Epilogue, Epilogue::gelu>());
        case Epilogue::gelu_tanh: return use(std::integral_constant<Epilogue, Epilogue::gelu_tanh>());
        case Epilogue::add: return use(std::integral_constant<Epilogue, Epilogue::add>());
        case Epilogue::mul: return use(std::integral_constant<Epilogue, Epilogue::mul>());
        case Epilogue::logit: return use(std::integral_constant<Epilogue, Epilogue::logit>());
    }
}

template <class SumReader>
inline void apply_epilogue(const LinearCall& call, int64_t first, int64_t rows, int64_t at, const SumReader& sums) {
    with_epilogue(call.epilogue, [&](auto epilogue) { apply_epilogue<epilogue>(call, first, rows, at, sums); });
}

// Sums whose epilogue is applied a few rows at a time, while the next sums are computed. The epilogue is `epilogue`, or
// mul for an up projection.
template <Epilogue epilogue, class SumReader>
class PendingEpilogue {
  public:
    // Sets the arguments of `apply_epilogue`; the previous sums must be finished. Prefetches what add and mul read: its
    // rows are far apart, and those of a long prompt come from memory.
    void set(const LinearCall& call, int64_t first, int64_t rows, int64_t at, const SumReader& sums) {
        call_ = &call, first_ = first, rows_ = rows, at_ = at, sums_ = sums;
        if (call.epilogue != Epilogue::add && call.epilogue != Epilogue::mul) return;
        for (int64_t row = first; row < first + rows; row++)
            prefetch_l1((const uint8_t*)(call.other + row * call.weight.outputs + at));
    }

    void run_some(int64_t most) {
        const int64_t rows = std::min(most, rows_);
        if (rows == 0) return;
        if (call_->epilogue == epilogue) apply_epilogue<epilogue>(*call_, first_, rows, at_, sums_);
        else apply_epilogue<Epilogue::mul>(*call_, first_, rows, at_, sums_);
        first_ += rows, rows_ -= rows, sums_.next(rows);
    }

    void run_rest() { run_some(rows_); }

  private:
    const LinearCall* call_ = nullptr;
    int64_t first_ = 0, rows_ = 0, at_ = 0;
    SumReader sums_{};
};

}  // namespace tgi
