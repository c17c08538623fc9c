// A linear layer with a packed weight. See linear.cpp.
#pragma once
#include <cstdint>
#include <vector>

#include "packed_weight.h"
#include "argmax.h"
#include "thread_pool.h"

namespace tgi {

// clamped_silu and clamped_mul are the gate and the up projection of gpt-oss: g * sigmoid(1.702 g) with g = min(sum, 7),
// and other * (1 + the sum clamped to -7 to 7). xielu: see activations.py. clip: the sum clamped to two factors.
enum class Epilogue : int64_t { none, silu, gelu, gelu_tanh, relu, relu2, clamped_silu, xielu, clip, add, mul, clamped_mul,
    logit };

// Whether the epilogue has a second operand.
constexpr bool is_binary(Epilogue epilogue) {
    return epilogue == Epilogue::add || epilogue == Epilogue::mul || epilogue == Epilogue::clamped_mul;
}

// Turns the sums of the output head into logits: cap * tanh(scale * sum / cap), or scale * sum if cap is 0.
struct LogitScale {
    float scale, cap;
};

// One matrix product. Matrices are row-major, contiguous except for `plus` [rows, outputs], and of type Element, but
// `plus`, `bias` [outputs] and `wide` are float32. The result goes to one of `y`, `wide` [rows, outputs] and `block_maxima`. `plus`
// and `bias` may be null. With a gate and an up projection y = epilogue(x gate^T + plus + bias) * (x up^T + plus +
// bias), where plus and bias have the gate's outputs first and then the up projection's.
struct LinearCall {
    const Element* x;  // [rows, inputs]
    PackedWeight weight;
    const float* bias;
    const float* plus;  // LoRA sums, with a stride of `plus_step` elements
    const Element* other;  // [rows, outputs], the operand of a binary epilogue
    Element* y;
    float* wide;
    int64_t rows, plus_step;
    Epilogue epilogue;
    LogitScale logit_scale;  // of Epilogue::logit; of xielu and clip their factors
    const BlockMaxima* block_maxima;
    const PackedWeight* next = nullptr;  // the weight of the next product, if that is known
};

void linear(ThreadPool& pool, const LinearCall& call);

// The rows from `first` on that are multiplied with a weight of their own.
struct WeightRows {
    const uint8_t* weight;  // of the shape and format of the call's
    const float* bias;  // may be null
    int64_t first, rows;
};

// One product of many weights: `groups` divide the rows of the call, whose own `weight.at` and `bias` are not used. A
// thread that has finished its share of one group goes on with the next one, so that groups of few rows cost no wait.
void grouped_linear(ThreadPool& pool, const LinearCall& call, const std::vector<WeightRows>& groups);

// The same for formats of one kind and at least one row. Each kind is compiled in a source file of its own
// (linear_numbers.cpp, ...), so that they are compiled at the same time.
template <FormatKind kind>
void linear_of(ThreadPool& pool, const LinearCall& call);
template <FormatKind kind>
void grouped_linear_of(ThreadPool& pool, const LinearCall& call, const std::vector<WeightRows>& groups);

}  // namespace tgi
