// Cache lines, and prefetch instructions for memory that is needed soon.
#pragma once
#include <algorithm>
#include <cstdint>

namespace tgi {

constexpr int64_t CACHE_LINE = 64;  // bytes

// Prefetch distance in bytes, the smallest that reaches the full memory bandwidth. It stays below 4 KB, since the
// hardware prefetcher starts anew in each page.
constexpr int64_t PREFETCH_DISTANCE = 1536;

// Prefetches a cache line into the L1 cache. Inlined by force, here and below: GCC drops calls of functions that do nothing
// but prefetch.
__attribute__((always_inline)) inline void prefetch_l1(const uint8_t* at) { __builtin_prefetch(at, 0, 3); }

// Prefetches consecutive cache lines into the L2 cache.
__attribute__((always_inline)) inline void prefetch_l2(const uint8_t* at, int64_t lines) {
    for (; lines > 0; lines--, at += CACHE_LINE) __builtin_prefetch(at, 0, 2);
}

// Memory that a thread will read next. The thread prefetches it while it waits for the others, when the memory bus
// would be idle.
class PrefetchRange {
  public:
    PrefetchRange() = default;
    PrefetchRange(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}

    explicit operator bool() const { return at_ < end_; }

    // Prefetches a few lines, so that a waiting thread polls again soon: a core has about 16 requests in flight at
    // once.
    void prefetch_some() {
        const int64_t lines = std::min(LINES_AT_ONCE, (end_ - at_ + CACHE_LINE - 1) / CACHE_LINE);
        prefetch_l2(at_, lines);
        at_ += lines * CACHE_LINE;
    }

  private:
    static constexpr int64_t LINES_AT_ONCE = 8;
    const uint8_t *at_ = nullptr, *end_ = nullptr;
};

}  // namespace tgi
