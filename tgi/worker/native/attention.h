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
    int64_t kv_heads, head_dim;
};

// What the tokens of a step bring to a layer. Each token has `heads` queries, then the keys, then the values.
struct Fresh {
    bf16* qkv;             // [tokens, (heads + 2 * kv_heads) * head_dim]; queries are turned in place
    const float* cos;      // [tokens, turned]
    const float* sin;
    const int64_t* places;  // [tokens] page * PAGE + offset
    int64_t tokens, heads;
    int64_t turned;   // numbers of a head, from the first on
    bool neighbours;  // a pair is numbers 2 i and 2 i + 1, not i and i + turned / 2
};

// Turns queries and keys and writes keys and values to their places.
void place(Team& team, const Cache& cache, const Fresh& fresh);

// The rows of a step: row r has the tokens `bounds[r]` to `bounds[r + 1]` and sees `contexts[r]` positions, whose pages
// are pages[r * width], ...
struct Seen {
    const int64_t* bounds;
    const int64_t* contexts;
    const int32_t* pages;
    int64_t rows, width;
};

// y [tokens, heads * head_dim] = softmax(cap(scale * q k)) v, causal. A query sees the last `window` positions, its own
// included, or all if it is 0; cap(s) = softcap * tanh(s / softcap), or s if it is 0.
struct Attention {
    const bf16* qkv;  // as `place` left it
    bf16* y;
    int64_t heads, window;
    float scale, softcap;
};

void attend(Team& team, const Cache& cache, const Seen& seen, const Attention& call);

}  // namespace tgi
