// The gated delta rule (Yang et al., "Gated Delta Networks", 2025): each value head of a sequence has a matrix of state.
#pragma once
#include <cstdint>

#include "causal_conv.h"
#include "elements.h"
#include "thread_pool.h"

namespace tgi {

constexpr int64_t MAX_STATE_DIM = 256;  // of key_dim and value_dim

// For each token, with k and q of the unit length, q divided by sqrt(key_dim), g = exp(-decay softplus(a + offset)) and
// S the state:
//     S = g S,  S = S + k (m sigmoid(b) (v - S^T k))^T,  y = norm(S^T q) silu(z)
// With m = 2 instead of 1 the matrix that S is multiplied with may have negative eigenvalues (Grazzi et al., 2025). norm is an RMS norm over the value_dim elements of a head. Value heads share the queries and keys of a key head.
struct DeltaCall {
    const Element* x;  // [tokens, x_step]: q and k of the key heads, v of the value heads
    const Element* z;  // [tokens, z_step], of the value heads
    const Element* ba;  // [tokens, 2 * value_heads]: b, then a of the value heads
    Element* y;  // [tokens, value_heads * value_dim]
    float* state;  // in slot 0, [value_heads, key_dim, value_dim]
    const float* decay;  // [value_heads]
    const float* offset;  // [value_heads]
    const float* norm;  // [value_dim], its weight
    int64_t key_heads, value_heads, key_dim, value_dim, x_step, z_step;
    float epsilon;
    float most;  // m
};

void delta_rule(ThreadPool& pool, const StateRows& rows, const DeltaCall& call);

}  // namespace tgi
