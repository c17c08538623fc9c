// The output head. See head.cpp.
#pragma once
#include "linear.h"
#include "argmax.h"
#include "thread_pool.h"

namespace tgi {

struct HeadCall {
    const Element* x;  // [rows, inputs]
    PackedWeight weight;
    const float* bias;  // [outputs], or null
    LogitScale logit_scale;
    int64_t rows;
    const PackedWeight* next = nullptr;  // as in LinearCall
};

// All logits, float32 [rows, outputs].
void logits(ThreadPool& pool, const HeadCall& call, float* wide);
// The greedy tokens. Logits are not stored; `block_maxima` is memory for all rows.
void greedy_head(ThreadPool& pool, const HeadCall& call, const BlockMaxima& block_maxima, const GreedyTokens& best);

}  // namespace tgi
