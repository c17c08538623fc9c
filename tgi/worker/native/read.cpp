// See read.h.
#include "read.h"

#include <algorithm>
#include <atomic>

#include "product.h"

namespace tgi {
namespace {

struct ReadJob final : Job {
    ReadJob(const void* at, int64_t bytes) : at((const char*)at), bytes(bytes) {}

    int64_t chunks() const { return (bytes + SHARE - 1) / SHARE; }

    void run(int64_t chunk, int64_t) const override {
        __m512i sum = _mm512_setzero_si512();
        const int64_t last = std::min((chunk + 1) * SHARE, bytes);
        for (int64_t from = chunk * SHARE; from < last; from += LINE) {
            ask((const uint8_t*)at + from + AHEAD, 1);
            sum = _mm512_add_epi64(sum, _mm512_loadu_si512(at + from));
        }
        total.fetch_add(_mm512_reduce_add_epi64(sum), std::memory_order_relaxed);
    }

    static constexpr int64_t SHARE = 1 << 18;  // bytes of a chunk
    const char* const at;
    const int64_t bytes;
    mutable std::atomic<int64_t> total{0};
};

}  // namespace

int64_t read(Team& team, const void* at, int64_t bytes) {
    const ReadJob job(at, bytes);
    team.run(job, job.chunks());
    return job.total;
}

}  // namespace tgi
