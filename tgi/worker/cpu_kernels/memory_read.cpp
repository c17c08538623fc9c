// See memory_read.h.
#include "memory_read.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "prefetch.h"

namespace tgi {
namespace {

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif

struct ReadMemoryJob final : Job {
    ReadMemoryJob(const void* at, int64_t bytes) : at((const char*)at), bytes(bytes) {}

    int64_t chunks() const { return (bytes + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        Words sums[CACHE_LINE / sizeof(Words)] = {};
        const int64_t last = std::min((chunk + 1) * CHUNK, bytes);
        for (int64_t from = chunk * CHUNK; from < last; from += CACHE_LINE) {
            prefetch_l2((const uint8_t*)at + from + PREFETCH_DISTANCE, 1);
            for (Words& sum : sums) {
                Words words;
                memcpy(&words, at + from + (&sum - sums) * sizeof words, sizeof words);
                sum += words;
            }
        }
        int64_t all = 0;
        for (const Words& sum : sums)
            for (size_t lane = 0; lane < sizeof(Words) / 8; lane++) all += sum[lane];
        total.fetch_add(all, std::memory_order_relaxed);
    }

    typedef int64_t Words __attribute__((vector_size(REGISTER_BYTES)));
    static constexpr int64_t CHUNK = 1 << 18;  // bytes of a chunk
    const char* const at;
    const int64_t bytes;
    mutable std::atomic<int64_t> total{0};
};

}  // namespace

int64_t read_memory(ThreadPool& pool, const void* at, int64_t bytes) {
    const ReadMemoryJob job(at, bytes);
    pool.run(job, job.chunks());
    return job.total;
}

}  // namespace tgi
