// The epilogue of a matrix product: bias, LoRA sums, activation or other operation, and rounding to the output type.
#pragma once
#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "prefetch.h"
#include "simd.h"

namespace tgi {

inline Float to_logit(Float sum, const LogitScale& how) {
    const Float scaled = sum * broadcast(how.scale);
    return how.cap ? tanh(scaled * broadcast(1 / how.cap)) * broadcast(how.cap) : scaled;
}

// Reads float32 sums [rows][32].
struct FloatSums {
    Float of(int half) const { return load(at + LANES * half); }
    void next(int64_t rows) { at += rows * PANEL; }

    const float* at;
};

// Applies the epilogue to the sums of rows from `first` on, for the outputs from `at` on.
template <Epilogue epilogue, class SumReader>
void apply_epilogue(const LinearCall& call, int64_t first, int64_t rows, int64_t at, SumReader sums) {
    const int64_t outputs = call.weight.outputs;
    // Outputs of each half of the panel.
    const int64_t count[2] = {std::min(outputs - at, LANES), std::clamp<int64_t>(outputs - at - LANES, 0, LANES)};
    Float bias[2] = {};
    for (int half = 0; call.bias && half < 2; half++) bias[half] = load_first(call.bias + at + LANES * half,
        count[half]);
    for (int64_t row = first; row < first + rows; row++, sums.next(1)) {
        const int64_t to = row * outputs + at;
        Float y[2];
        for (int half = 0; half < 2; half++) {
            y[half] = sums.of(half);
            if (call.bias) y[half] = y[half] + bias[half];
            if (call.plus) {
                const float* plus = call.plus + row * call.plus_step + at + LANES * half;
                y[half] = y[half] + load_first(plus, count[half]);
            }
            if (epilogue == Epilogue::silu) y[half] = silu(y[half]);
            if (epilogue == Epilogue::gelu) y[half] = gelu(y[half]);
            if (epilogue == Epilogue::gelu_tanh) y[half] = gelu_tanh(y[half]);
            if (epilogue == Epilogue::relu) y[half] = at_least(0, y[half]);
            if (epilogue == Epilogue::relu2) y[half] = at_least(0, y[half]) * at_least(0, y[half]);
            if (epilogue == Epilogue::clamped_silu) y[half] = clamped_silu(y[half]);
            if (epilogue == Epilogue::xielu) y[half] = xielu(y[half], call.logit_scale.scale, call.logit_scale.cap);
            if (epilogue == Epilogue::clip)
                y[half] = at_most(call.logit_scale.cap, at_least(call.logit_scale.scale, y[half]));
            if (epilogue == Epilogue::logit) y[half] = to_logit(y[half], call.logit_scale);
            if (is_binary(epilogue)) {
                const Float other = load_first(call.other + to + LANES * half, count[half]);
                if (epilogue == Epilogue::clamped_mul) y[half] = broadcast(1.f) + at_most(7.f, at_least(-7.f, y[half]));
                y[half] = epilogue == Epilogue::add ? y[half] + other : y[half] * other;
            }
            if (call.wide) store_first(call.wide + to + LANES * half, y[half], count[half]);
        }
        if (call.block_maxima) {
            for (int half = 0; half < 2; half++) y[half] = select(first_lanes(count[half]), y[half],
                broadcast(LOWEST));
            call.block_maxima->set(row, at / PANEL, y[0], y[1]);
        } else if (!call.wide) {
            if (count[1] == LANES) store(call.y + to, y[0], y[1]);
            else
                for (int half = 0; half < 2; half++) store_first(call.y + to + LANES * half, y[half], count[half]);
        }
    }
}

// The same for the epilogue of the call. Not inlined: with all epilogues it is long, and products call it in many places.
template <class SumReader>
__attribute__((noinline)) void apply_epilogue(const LinearCall& call, int64_t first, int64_t rows, int64_t at,
    const SumReader& sums) {
    switch (call.epilogue) {
        case Epilogue::none: return apply_epilogue<Epilogue::none>(call, first, rows, at, sums);
        case Epilogue::silu: return apply_epilogue<Epilogue::silu>(call, first, rows, at, sums);
        case Epilogue::gelu: return apply_epilogue<Epilogue::gelu>(call, first, rows, at, sums);
        case Epilogue::gelu_tanh: return apply_epilogue<Epilogue::gelu_tanh>(call, first, rows, at, sums);
        case Epilogue::relu: return apply_epilogue<Epilogue::relu>(call, first, rows, at, sums);
        case Epilogue::relu2: return apply_epilogue<Epilogue::relu2>(call, first, rows, at, sums);
        case Epilogue::clamped_silu: return apply_epilogue<Epilogue::clamped_silu>(call, first, rows, at, sums);
        case Epilogue::xielu: return apply_epilogue<Epilogue::xielu>(call, first, rows, at, sums);
        case Epilogue::clip: return apply_epilogue<Epilogue::clip>(call, first, rows, at, sums);
        case Epilogue::add: return apply_epilogue<Epilogue::add>(call, first, rows, at, sums);
        case Epilogue::mul: return apply_epilogue<Epilogue::mul>(call, first, rows, at, sums);
        case Epilogue::clamped_mul: return apply_epilogue<Epilogue::clamped_mul>(call, first, rows, at, sums);
        case Epilogue::logit: return apply_epilogue<Epilogue::logit>(call, first, rows, at, sums);
    }
}

// Sums whose epilogue is applied a few rows at a time, while the next sums are computed.
template <class SumReader>
class PendingEpilogue {
  public:
    // Sets the arguments of `apply_epilogue`; the previous sums must be finished. Prefetches what binary epilogues read: its
    // rows are far apart, and those of a long prompt come from memory.
    void set(const LinearCall& call, int64_t first, int64_t rows, int64_t at, const SumReader& sums) {
        call_ = &call, first_ = first, rows_ = rows, at_ = at, sums_ = sums;
        if (!is_binary(call.epilogue)) return;
        for (int64_t row = first; row < first + rows; row++)
            prefetch_l1((const uint8_t*)(call.other + row * call.weight.outputs + at));
    }

    void run_some(int64_t most) {
        const int64_t rows = std::min(most, rows_);
        if (rows == 0) return;
        apply_epilogue(*call_, first_, rows, at_, sums_);
        first_ += rows, rows_ -= rows, sums_.next(rows);
    }

    void run_rest() { run_some(rows_); }

  private:
    const LinearCall* call_ = nullptr;
    int64_t first_ = 0, rows_ = 0, at_ = 0;
    SumReader sums_{};
};

}  // namespace tgi
