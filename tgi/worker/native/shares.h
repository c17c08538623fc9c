// How a product of many rows and panels is divided among threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace tgi {

// Panels in the order in which they lie in memory, once for each group of rows. Each thread begins with a stretch of its
// own and goes through it from end to end, since memory brings what follows sooner than what lies elsewhere. It takes half
// of what is left of it at once, or most of it if rows are few: such a product is over in some microseconds. Who has none
// left takes half of what somebody else has (Blumofe and Leiserson, 1999), so all are done at about the same time.
class Shares {
  public:
    struct Chunk {
        int64_t row, rows, first, last;  // of the panels, the last one is not in it
    };

    // Chunks of up to `height` rows.
    Shares(int64_t rows, int64_t height, int64_t panels, int64_t threads)
        : rows_(rows), height_(height), panels_(panels), eighths_(rows > FEW ? 4 : 7), stretches_(threads) {
        const int64_t all = (rows + height - 1) / height * panels;
        for (int64_t n = 0; n < threads; n++)
            stretches_[n].left = pack(begin(all, n, threads), begin(all, n + 1, threads));
    }

    // Where a thread's stretch begins, of so many panels of one group of rows.
    static int64_t begin(int64_t panels, int64_t thread, int64_t threads) { return panels * thread / threads; }

    int64_t threads() const { return stretches_.size(); }

    // The next chunk of one thread's; false if there is nothing left at all.
    bool claim(int64_t thread, Chunk& chunk) {
        std::atomic<uint64_t>& mine = stretches_[thread].left;
        for (;;) {
            uint64_t left = mine.load(std::memory_order_relaxed);
            while (const int64_t count = size(left)) {
                const int64_t at = begin(left), take = std::min((count * eighths_ + 7) / 8, panels_ - at % panels_);
                if (!mine.compare_exchange_weak(left, pack(at + take, at + count), std::memory_order_relaxed)) continue;
                const int64_t row = at / panels_ * height_, first = at % panels_;
                chunk = {row, std::min(rows_ - row, height_), first, first + take};
                return true;
            }
            if (!steal(mine)) return false;
        }
    }

  private:
    struct alignas(64) Stretch {
        std::atomic<uint64_t> left{0};
    };

    static uint64_t pack(uint64_t begin, uint64_t end) { return begin << 32 | end; }
    static int64_t begin(uint64_t left) { return left >> 32; }
    static int64_t size(uint64_t left) { return int64_t(left & 0xffffffff) - begin(left); }

    // The second half of what the richest has left becomes `mine`.
    bool steal(std::atomic<uint64_t>& mine) {
        for (;;) {
            Stretch* richest = nullptr;
            uint64_t most = 0;
            for (Stretch& one : stretches_) {
                const uint64_t left = one.left.load(std::memory_order_relaxed);
                if (size(left) > size(most)) most = left, richest = &one;
            }
            if (!richest) return false;
            const uint64_t end = begin(most) + size(most), middle = begin(most) + size(most) / 2;
            if (!richest->left.compare_exchange_strong(most, pack(begin(most), middle), std::memory_order_relaxed)) continue;
            mine.store(pack(middle, end), std::memory_order_relaxed);
            return true;
        }
    }

    static constexpr int64_t FEW = 16;
    const int64_t rows_, height_, panels_, eighths_;
    std::vector<Stretch> stretches_;
};

}  // namespace tgi
