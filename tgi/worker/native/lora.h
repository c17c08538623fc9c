// See lora.cpp.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

using bf16 = uint16_t;

// What an adapter does to one projection: x a b. `rank` and the sizes of a projection are multiples of 32; an adapter that
// leaves the projection alone has rank 0.
struct Pair {
    const bf16* a;  // [rank / 32][inputs / 2][32][2]
    const bf16* b;  // [outputs / 32][rank / 2][32][2]
    int64_t rank;
};

// The projections of one input, whose results stand side by side.
struct LoraCall {
    const bf16* x;                // [tokens, inputs]
    float* plus;                  // [tokens, width]; rows of tokens without an adapter are left as they are
    const int64_t* tokens;        // sorted by adapter
    const int64_t* tiles;         // [count + 1] tile t has tokens tiles[t] to tiles[t + 1], MOST_ROWS at most,
    const int64_t* owners;        // [count] of adapter owners[t]
    const Pair* const* adapters;  // of each adapter `parts` pairs
    const int64_t* bounds;        // [parts + 1] where the results of each projection begin in a row of `plus`
    int64_t inputs, width, count, parts;
};

void lora(Team& team, const LoraCall& call);

}  // namespace tgi
