// The output head. See head.cpp.
#pragma once
#include <vector>

#include "linear.h"
#include "argmax.h"
#include "rank_group.h"
#include "thread_pool.h"

namespace tgi {

// How the vocabulary is divided among ranks: `outputs` are the logits of each. All but the last have whole panels.
struct VocabularyShards {
    RankGroup* group;  // null: this is the only rank
    std::vector<int64_t> outputs;
};

struct HeadCall {
    const Element* x;  // [rows, inputs]
    PackedWeight weight;
    const float* bias;  // [outputs], or null
    LogitScale logit_scale;
    int64_t rows;
    const VocabularyShards* shards = nullptr;  // null: `weight` has the whole vocabulary
    const PackedWeight* next = nullptr;  // as in LinearCall
};

// The logits of this rank, float32 [rows, outputs].
void logits(ThreadPool& pool, const HeadCall& call, float* wide);
// The greedy tokens of the whole vocabulary. Logits are not stored; `room` is memory for the BlockMaxima of all rows and
// ranks, which exchange them.
void greedy_head(ThreadPool& pool, const HeadCall& call, void* room, const GreedyTokens& best);

}  // namespace tgi
