// Divides a matrix product of many rows and panels among threads, by work stealing.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace tgi {

// The items are panels in the order of their addresses, repeated for each group of rows. Each thread starts with a
// contiguous range of its own and goes through it in order, since memory delivers consecutive addresses fastest. It
// claims half of the rest of its range at once, or 7/8 if there are few rows: such a product takes only microseconds. A
// thread with an empty range steals half of the largest remaining one (Blumofe and Leiserson, 1999), so that all finish
// at about the same time.
class WorkStealingQueue {
  public:
    struct Chunk {
        int64_t row, rows, first, last;  // panels first .. last - 1
    };

    // Chunks have up to `height` rows.
    WorkStealingQueue(int64_t rows, int64_t height, int64_t panels, int64_t threads)
        : rows_(rows), height_(height), panels_(panels), claimed_eighths_(rows > FEW_ROWS ? 4 : 7), ranges_(threads) {
        const int64_t all = (rows + height - 1) / height * panels;
        for (int64_t n = 0; n < threads; n++)
            ranges_[n].left = pack(begin(all, n, threads), begin(all, n + 1, threads));
    }

    // The first of `panels` panels in a thread's range, for one group of rows.
    static int64_t begin(int64_t panels, int64_t thread, int64_t threads) { return panels * thread / threads; }

    int64_t threads() const { return ranges_.size(); }

    // The next chunk for this thread; false if no work is left.
    bool claim(int64_t thread, Chunk& chunk) {
        std::atomic<uint64_t>& mine = ranges_[thread].left;
        for (;;) {
            uint64_t left = mine.load(std::memory_order_relaxed);
            while (const int64_t count = size(left)) {
                const int64_t at = begin(left), take = std::min((count * claimed_eighths_ + 7) / 8,
                    panels_ - at % panels_);
                if (!mine.compare_exchange_weak(left, pack(at + take, at + count), std::memory_order_relaxed)) continue;
                const int64_t row = at / panels_ * height_, first = at % panels_;
                chunk = {row, std::min(rows_ - row, height_), first, first + take};
                return true;
            }
            if (!steal(mine)) return false;
        }
    }

  private:
    struct alignas(64) ThreadRange {
        std::atomic<uint64_t> left{0};
    };

    static uint64_t pack(uint64_t begin, uint64_t end) { return begin << 32 | end; }
    static int64_t begin(uint64_t left) { return left >> 32; }
    static int64_t size(uint64_t left) { return int64_t(left & 0xffffffff) - begin(left); }

    // Moves the second half of the largest remaining range to `mine`.
    bool steal(std::atomic<uint64_t>& mine) {
        for (;;) {
            ThreadRange* largest = nullptr;
            uint64_t largest_left = 0;
            for (ThreadRange& one : ranges_) {
                const uint64_t left = one.left.load(std::memory_order_relaxed);
                if (size(left) > size(largest_left)) largest_left = left, largest = &one;
            }
            if (!largest) return false;
            const uint64_t end = begin(largest_left) + size(largest_left),
                middle = begin(largest_left) + size(largest_left) / 2;
            if (!largest->left.compare_exchange_strong(largest_left, pack(begin(largest_left), middle),
                std::memory_order_relaxed)) continue;
            mine.store(pack(middle, end), std::memory_order_relaxed);
            return true;
        }
    }

    static constexpr int64_t FEW_ROWS = 16;
    const int64_t rows_, height_, panels_, claimed_eighths_;
    std::vector<ThreadRange> ranges_;
};

}  // namespace tgi
