// See attention.cpp.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

using bf16 = uint16_t;

// One layer's keys and values, [pages][kv_heads][2 * PAGE * head_dim]: of each page and head first the keys as
// [head_dim / 2][PAGE][2], then the values as [PAGE / 2][head_dim][2].
struct Cache {
    bf16* at;
    int64_t heads, kv_heads, head_dim;
};

// Row r has the tokens bounds[r] to bounds[r + 1] and sees contexts[r] positions, whose pages are pages[r * width], …
struct Step {
    const int64_t* places;  // [tokens] where each token's key and value go: page * PAGE + offset
    const int32_t* bounds;
    const int32_t* contexts;
    const int32_t* pages;
    int64_t rows, width;
};

// y [tokens, heads * head_dim] = softmax(cap(scale * q k)) v, causal. A query sees the last `window` positions, its own
// included, or all if it is 0; cap(s) = softcap * tanh(s / softcap), or s if it is 0.
struct Attention {
    const bf16* qkv;  // [tokens, (heads + 2 * kv_heads) * head_dim]: of each token its queries, keys, values
    bf16* y;
    int64_t window;
    float scale, softcap;
};

// Writes the keys and values to their places, then computes y.
void attend(Team& team, const Cache& cache, const Step& step, const Attention& call);

}  // namespace tgi
