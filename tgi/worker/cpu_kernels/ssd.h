// State space duality, Mamba2's recurrence (Dao and Gu, "Transformers are SSMs", 2024): each head of a sequence has a
// matrix of state. And the gated norm of its result.
#pragma once
#include <cstdint>

#include "causal_conv.h"
#include "elements.h"
#include "thread_pool.h"

namespace tgi {

// For each token, with d = softplus(dt_scale dt + offset) within the bounds and S the state:
//     S = exp(-decay d) S + B (d x)^T,  y = S^T C + skip x
// Neighbouring heads share the B and C of a group. The sizes of a state are at most MAX_STATE_DIM.
struct SsdCall {
    const Element* x;  // [tokens, x_step]: x of the heads, then B of the groups, then C of the groups
    const Element* dt;  // [tokens, dt_step], of the heads
    Element* y;  // [tokens, heads * head_dim]
    float* state;  // in slot 0, [heads, state_dim, head_dim]
    const float* decay;  // [heads]
    const float* offset;  // [heads]
    const float* skip;  // [heads]
    int64_t heads, groups, head_dim, state_dim, x_step, dt_step;
    float dt_scale, least, most;  // the last two of d
};

void ssd(ThreadPool& pool, const StateRows& rows, const SsdCall& call);

// What is normed, if anything; g = silu(gate_scale z).
enum class GatedNormForm : int64_t {
    NONE,  // weight y g
    GATE_FIRST,  // weight norm(y g)
    GATE_LAST,  // weight norm(y) g
};

// norm is an RMS norm over each of the `groups` parts of a row, without a weight.
struct GatedNormCall {
    Element* y;  // [tokens, groups * size], overwritten
    const Element* z;  // [tokens, z_step]
    const float* weight;  // [groups * size]
    int64_t tokens, groups, size, z_step;
    float gate_scale, epsilon;
    GatedNormForm form;
};

void gated_norm(ThreadPool& pool, const GatedNormCall& call);

}  // namespace tgi
