// y = weight * (x - m) / sqrt(mean((x - m)^2) + epsilon) + bias for parts of each row of x. m is the mean of the part
// if `centred` (layer norm), else 0 (RMS norm).
#pragma once
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

struct NormCall {
    const Element* x;  // [rows, step]; the first `parts` times `size` elements of each row are normed
    const float* weight;  // [parts, size]
    const float* bias;  // [parts, size], or null
    Element* y;  // [rows, step]; may be x
    int64_t rows, step, parts, size;
    bool centred;
    float epsilon;
};

void norm(ThreadPool& pool, const NormCall& call);

}  // namespace tgi
