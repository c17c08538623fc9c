// See rank_group.h.
#include "rank_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "simd.h"

namespace tgi {
namespace {

constexpr int64_t BLOCK_BYTES = 1 << 18;
constexpr int64_t BLOCK_SIZE = BLOCK_BYTES / sizeof(Element);

// Sleeps until the number is no longer `seen`, and sometimes shorter.
void sleep_while(const std::atomic<uint32_t>& number, uint32_t seen) {
#if defined(__linux__)
    const timespec limit{0, 100'000'000};
    syscall(SYS_futex, &number, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    if (number.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(const std::atomic<uint32_t>& number) {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

struct SumJob final : Job {
    SumJob(const uint8_t* blocks, int64_t ranks, Element* x, int64_t size)
        : blocks(blocks), ranks(ranks), x(x), size(size) {}

    int64_t chunks() const { return (size + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, size);
        for (int64_t at = chunk * CHUNK; at < last; at += LANES) {
            Float sum = load_first(part(0) + at, last - at);
            for (int64_t rank = 1; rank < ranks; rank++) sum = sum + load_first(part(rank) + at, last - at);
            store_first(x + at, sum, last - at);
        }
    }

    const Element* part(int64_t rank) const {
        return reinterpret_cast<const Element*>(blocks + rank * BLOCK_BYTES);
    }

    static constexpr int64_t CHUNK = 16384;  // elements of a chunk
    const uint8_t* blocks;
    const int64_t ranks;
    Element* x;
    const int64_t size;
};

}  // namespace

int64_t RankGroup::shared_bytes(int64_t ranks) { return ranks * (sizeof(Announcement) + 2 * BLOCK_BYTES); }

RankGroup::RankGroup(void* memory, int64_t rank, int64_t ranks, int spins)
    : announcements_(static_cast<Announcement*>(memory)),
      blocks_(static_cast<uint8_t*>(memory) + ranks * sizeof(Announcement)),
      rank_(rank), ranks_(ranks), spins_(spins) {}

void RankGroup::all_reduce(ThreadPool& pool, Element* x, int64_t size) {
    for (int64_t at = 0; at < size; at += BLOCK_SIZE) {
        const int64_t count = std::min(BLOCK_SIZE, size - at);
        round_++;
        std::memcpy(block(rank_), x + at, count * sizeof(Element));
        announce();
        wait_for_all();
        const SumJob job(block(0), ranks_, x + at, count);
        pool.run(job, job.chunks());
    }
}

void RankGroup::all_gather(const uint8_t* own, int64_t rows, const int64_t* widths, uint8_t* joined) {
    const int64_t most = rows * *std::max_element(widths, widths + ranks_);
    const int64_t stride = std::accumulate(widths, widths + ranks_, int64_t(0));
    for (int64_t at = 0; at < most; at += BLOCK_BYTES) {
        const auto here = [&](int64_t rank) { return std::clamp<int64_t>(rows * widths[rank] - at, 0, BLOCK_BYTES); };
        round_++;
        std::memcpy(block(rank_), own + at, here(rank_));
        announce();
        uint8_t* column = joined;
        for (int64_t rank = 0; rank < ranks_; column += widths[rank++]) {
            if (rank != rank_) wait_for(announcements_[rank]);
            if (rank == rank_ && own == column) continue;
            const uint8_t* from = block(rank);
            for (int64_t next = at, end = at + here(rank); next < end;) {
                const int64_t row = next / widths[rank], inside = next % widths[rank];
                const int64_t count = std::min(widths[rank] - inside, end - next);
                std::memcpy(column + row * stride + inside, from, count);
                next += count, from += count;
            }
        }
    }
}

uint8_t* RankGroup::block(int64_t rank) const { return blocks_ + ((round_ & 1) * ranks_ + rank) * BLOCK_BYTES; }

void RankGroup::announce() {
    Announcement& own = announcements_[rank_];
    own.round.store(round_);
    if (own.sleepers.load()) wake_all(own.round);
}

void RankGroup::wait_for_all() const {
    for (int64_t rank = 0; rank < ranks_; rank++)
        if (rank != rank_) wait_for(announcements_[rank]);
}

void RankGroup::wait_for(const Announcement& other) const {
    const auto behind = [&](uint32_t round) { return static_cast<int32_t>(round - round_) < 0; };
    for (int spin = 0; spin < spins_; spin++) {
        if (!behind(other.round.load(std::memory_order_acquire))) return;
        pause();
    }
    auto& sleepers = const_cast<Announcement&>(other).sleepers;
    sleepers.fetch_add(1);
    for (uint32_t seen = other.round.load(); behind(seen); seen = other.round.load()) sleep_while(other.round, seen);
    sleepers.fetch_sub(1);
}

}  // namespace tgi
