// Greedy tokens and their logprobs from blocks of 32 logits (panels of the output head).
//
// The output head keeps the maximum, its token id and the sum of exponentials of each block. Within a block and over
// the blocks of a row, all reductions have one order, so a row's result has the same bits whether its logits are in
// memory or come from a product, and for any number of threads. NaN counts as minus infinity.
#pragma once
#include <cstdint>
#include <limits>

#include "packed_weight.h"
#include "thread_pool.h"
#include "vector_math.h"

namespace tgi {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// For each row the highest logit, its lowest index, and -log(sum over all of e^(logit - highest)), which is NaN if
// `highest` is infinite.
struct GreedyTokens {
    int64_t* at;  // [rows] token ids
    float* highest;  // [rows]
    float* logprobs;  // [rows]
};

// e^x for x <= 0, with an absolute error below 1e-6.
inline Float exp_nonpositive(Float x) { return exp2(x * broadcast(1.44269504f)); }

// For each block of a row: the highest logit, its lowest index in the row, and the sum over the block of e^(logit -
// highest). Each is a line of all rows, and the three lines of a block follow each other, so consecutive blocks are
// consecutive memory. Of several ranks each sets the blocks of its part of the vocabulary.
struct BlockMaxima {
    // `memory` has BYTES for each of the `panels` blocks and row. `first` is the number of the first block that is set.
    BlockMaxima(void* memory, int64_t rows, int64_t panels, int64_t first = 0)
        : memory((float*)memory), rows(rows), panels(panels), first(first) {}

    static constexpr int64_t LINES = 3, BYTES = LINES * sizeof(float);

    float* highest(int64_t block) const { return memory + LINES * block * rows; }
    float* sums(int64_t block) const { return highest(block) + rows; }
    int32_t* at(int64_t block) const { return (int32_t*)(highest(block) + 2 * rows); }

    // Sets the block of a panel of a row. Elements behind the last logit are LOWEST.
    void set(int64_t row, int64_t panel, Float left, Float right) const {
        // The maximum is its second operand if one is NaN.
        left = max(left, broadcast(LOWEST)), right = max(right, broadcast(LOWEST));
        const float most = reduce_max(max(left, right));
        const Float all = broadcast(most), base = finite(all);
        const uint32_t equal = bits_of(left == all) | bits_of(right == all) << LANES;
        const int64_t block = first + panel;
        highest(block)[row] = most;
        sums(block)[row] = reduce_add(exp_nonpositive(left - base) + exp_nonpositive(right - base));
        at(block)[row] = block * PANEL + __builtin_ctz(equal);
    }

    // The number that is subtracted from logits: the highest, or 0 where that is LOWEST, so that the exponentials are
    // 0.
    static Float finite(Float most) { return select(most == broadcast(LOWEST), zeros(), most); }

    float* memory;  // [panels][LINES][rows]
    int64_t rows, panels, first;
};

// Reduces the blocks of all rows.
void reduce_blocks(ThreadPool& pool, const BlockMaxima& block_maxima, const GreedyTokens& best);

struct ArgmaxCall {
    const float* logits;  // [rows, size]
    BlockMaxima block_maxima;  // memory for all blocks
    GreedyTokens result;
    int64_t rows, size;
};

void argmax(ThreadPool& pool, const ArgmaxCall& call);

}  // namespace tgi
