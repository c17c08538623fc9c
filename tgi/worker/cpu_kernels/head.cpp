// The output head: all logits of a row, or only its greedy token. In the second case logits never reach memory: the
// epilogue of the product reduces each panel of them to a block maximum.
#include "head.h"

namespace tgi {
namespace {

LinearCall linear_call(const HeadCall& call) {
    LinearCall found{call.x, call.weight, call.bias};
    found.rows = call.rows;
    found.epilogue = Epilogue::logit;
    found.logit_scale = call.logit_scale;
    found.next = call.next;
    return found;
}

}  // namespace

void logits(ThreadPool& pool, const HeadCall& call, float* wide) {
    LinearCall all = linear_call(call);
    all.wide = wide;
    linear(pool, all);
}

void greedy_head(ThreadPool& pool, const HeadCall& call, void* room, const GreedyTokens& best) {
    LinearCall noted = linear_call(call);
    if (!call.shards || !call.shards->group) {
        const BlockMaxima block_maxima(room, call.rows, call.weight.panels());
        noted.block_maxima = &block_maxima;
        linear(pool, noted);
        reduce_blocks(pool, block_maxima, best);
        return;
    }
    RankGroup& group = *call.shards->group;
    std::vector<int64_t> bytes;  // of the blocks of each rank
    int64_t panels = 0, first = 0;
    for (const int64_t outputs : call.shards->outputs) {
        if ((int64_t)bytes.size() == group.rank()) first = panels;
        const int64_t own = (outputs + PANEL - 1) / PANEL;
        bytes.push_back(own * call.rows * BlockMaxima::BYTES);
        panels += own;
    }
    const BlockMaxima block_maxima(room, call.rows, panels, first);
    noted.block_maxima = &block_maxima;
    linear(pool, noted);
    group.all_gather((const uint8_t*)block_maxima.highest(first), 1, bytes.data(), (uint8_t*)room);
    reduce_blocks(pool, block_maxima, best);
}

}  // namespace tgi
