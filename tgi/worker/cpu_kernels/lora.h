// LoRA adapters. See lora.cpp.
#pragma once
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

// The matrices of an adapter for one projection: x a b. Each is stored in panels of 32 columns, whose numbers have the
// order of `element_index`, padded with zeros to multiples of 32 in both dimensions. `rank` is padded, too; rank 0: the
// adapter does not change this projection.
struct LoraPair {
    const Element* a;  // [rank / 32][inputs][32]
    const Element* b;  // [outputs / 32][rank][32]
    int64_t rank;
};

// The projections of one input, whose results are stored next to each other.
struct LoraCall {
    const Element* x;  // [tokens, inputs]
    float* plus;  // [tokens, width]; rows of tokens without an adapter are not written
    const int64_t* tokens;  // sorted by adapter
    const int64_t* tiles;  // [count + 1]: tile t has tokens tiles[t] to tiles[t + 1] - 1, at most MAX_TILE_ROWS,
    const int64_t* tile_adapters;  // [count]: of adapter tile_adapters[t]
    const LoraPair* const* adapters;  // for each adapter `parts` pairs
    const int64_t* bounds;  // [parts + 1]: the first column of each projection in a row of `plus`
    int64_t inputs, width, count, parts;
};

void lora(ThreadPool& pool, const LoraCall& call);

}  // namespace tgi
