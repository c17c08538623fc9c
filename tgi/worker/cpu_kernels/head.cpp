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

void greedy_head(ThreadPool& pool, const HeadCall& call, const BlockMaxima& block_maxima, const GreedyTokens& best) {
    LinearCall noted = linear_call(call);
    noted.block_maxima = &block_maxima;
    linear(pool, noted);
    reduce_blocks(pool, block_maxima, best);
}

}  // namespace tgi
