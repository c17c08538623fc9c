// y = weight * (x - m) / sqrt(mean((x - m)^2) + epsilon) + bias, for parts of each row of x; m is the part's mean where
// `centred`, else 0.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

using bf16 = uint16_t;

struct NormCall {
    const bf16* x;        // [rows, step], of which the first `parts` times `size` numbers of each row are normed
    const float* weight;  // [parts, size]
    const float* bias;    // the same; may be null
    bf16* y;              // [rows, step]; may be x
    int64_t rows, step, parts, size;
    bool centred;
    float epsilon;
};

void norm(Team& team, const NormCall& call);

}  // namespace tgi
