// Rotary position embedding.
#pragma once
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

// (a, b) becomes (a cos - b sin, b cos + a sin), for the pairs of the first `rotary_dim` elements of a head: elements i
// and i + rotary_dim / 2, or 2 i and 2 i + 1 if `neighbours`.
struct RopeCall {
    Element* x;  // [tokens, stride], in place; the first `heads` heads of each token are rotated
    const float* angles;  // [.., 2, rotary_dim]: the cos, then the sin of each position
    const int64_t* positions;  // [tokens]
    int64_t tokens, stride, heads, head_dim, rotary_dim;
    bool neighbours;
};

void rope(ThreadPool& pool, const RopeCall& call);

}  // namespace tgi
