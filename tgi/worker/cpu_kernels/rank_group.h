// Collective operations of processes ("ranks") on one host, through memory that they share.
#pragma once
#include <atomic>
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

// One rank's end. All ranks call the same operations in the same order. An operation proceeds in rounds: each rank
// copies a block of its data into the shared memory, announces it, waits until all have announced theirs, and reads all
// blocks. A rank waits first by polling, then asleep, since there may be more threads than cores. If another rank dies,
// it waits for ever: who starts the ranks ends them together.
class RankGroup {
  public:
    // The bytes that `ranks` ranks share.
    static int64_t shared_bytes(int64_t ranks);

    // `memory` has these bytes, is aligned to 64, and was zero before the first rank used it.
    RankGroup(void* memory, int64_t rank, int64_t ranks, int spins);

    // Replaces x by its sum over all ranks, in float32 and in the order of the ranks, rounded once.
    void all_reduce(ThreadPool& pool, Element* x, int64_t size);

    // Joins the columns of all ranks: rank r has widths[r] bytes in each row, [rows, widths[r]], and every rank gets
    // [rows, the sum of widths]. `own` may be its place in `joined`, if there is one row.
    void all_gather(const uint8_t* own, int64_t rows, const int64_t* widths, uint8_t* joined);

    int64_t rank() const { return rank_; }

  private:
    // One cache line for each rank, so that ranks do not take lines from each other.
    struct alignas(64) Announcement {
        std::atomic<uint32_t> round;
        std::atomic<uint32_t> sleepers;  // ranks that sleep, or are about to, until the round changes
    };

    // The block of a rank in this round. Blocks alternate between two places: a rank announces a round after it has
    // read all blocks of the previous one.
    uint8_t* block(int64_t rank) const;
    void announce();
    void wait_for(const Announcement& other) const;
    void wait_for_all() const;

    Announcement* const announcements_;  // [ranks]
    uint8_t* const blocks_;  // [2][ranks][BLOCK_BYTES]
    const int64_t rank_, ranks_;
    const int spins_;
    uint32_t round_ = 0;
};

}  // namespace tgi
