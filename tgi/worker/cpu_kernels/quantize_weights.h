// Quantizes weights at load. See quantize_weights.cpp.
#pragma once
#include <cstdint>

#include "packed_weight.h"
#include "thread_pool.h"

namespace tgi {

// The tables are those of quantization/quantize.py, with a row of 8 numbers for each grid point.
struct QuantizeCall {
    const void* weight;  // numbers [outputs, inputs], `inputs` a multiple of 32
    WeightFormat form;  // of the weight's numbers
    const float* grid_errors;  // GRID_ERRORS
    const uint8_t* grid_codes;  // GRID_CODES, and three bytes of padding
    f16* scales;  // float16 [outputs]
    uint8_t* codes;  // [outputs, inputs], or two in each byte
    uint8_t* factors;  // [outputs, inputs / 32]; null: 8 bits
    int64_t outputs, inputs;
};

void quantize(ThreadPool& pool, const QuantizeCall& call);

}  // namespace tgi
