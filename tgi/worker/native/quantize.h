// See quantize.cpp.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

using bf16 = uint16_t;

// What quantization/quantize.py says, with its tables: each has a row of 8 for every place.
struct QuantizeCall {
    const bf16* weight;      // [outputs, inputs], `inputs` a multiple of 32
    const float* errors;     // ERRORS
    const uint8_t* choices;  // CODES, and three bytes more
    uint16_t* scales;        // float16 [outputs]
    uint8_t* codes;          // [outputs, inputs], or two in each byte
    uint8_t* factors;        // [outputs, inputs / 32]; null: 8 bits
    int64_t outputs, inputs;
};

void quantize(Team& team, const QuantizeCall& call);

}  // namespace tgi
