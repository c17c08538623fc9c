// y = weight * (x - m) / sqrt(mean((x - m)^2) + epsilon) + bias, for each row of x; m is its mean where `centred`, else 0.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

using bf16 = uint16_t;

struct NormCall {
    const bf16* x;  // [rows, size]
    const float* weight;
    const float* bias;  // may be null
    bf16* y;            // may be x
    int64_t rows, size;
    bool centred;
    float epsilon;
};

void norm(Team& team, const NormCall& call);

}  // namespace tgi
