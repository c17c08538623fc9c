// See linear.cpp.
#pragma once
#include <cstdint>

#include "packed.h"
#include "peaks.h"
#include "team.h"

namespace tgi {

enum class Then : int64_t { none, silu, gelu, gelu_tanh, add, mul, score };

// What makes scores of the head's sums: cap * tanh(scale * sum / cap), or scale * sum if cap is 0.
struct Scoring {
    float scale, cap;
};

// One product. Matrices are row-major and, but for `plus` [rows, outputs], dense; bfloat16 but for `plus`, `bias` [outputs] and `wide`.
// One of `y`, `wide` [rows, outputs] and `peaks` takes the result. `plus` and `bias` may be null. Of a gate and another weight
// y = then(x gate^T + plus + bias) * (x other^T + plus + bias), with the gate's outputs of plus and bias in front of the
// other's.
struct LinearCall {
    const bf16* x;  // [rows, inputs]
    Packed weight;
    const float* bias;
    const float* plus;  // from one row to the next `plus_step` numbers
    const bf16* other;  // [rows, outputs], for add and mul
    bf16* y;
    float* wide;
    int64_t rows, plus_step;
    Then then;
    Scoring scoring;  // for score
    const Peaks* peaks;
    const Packed* next = nullptr;  // the weight of the product behind this one, if that is known
};

void linear(Team& team, const LinearCall& call);

}  // namespace tgi
