// The best of scores that are in memory.
#include "best.h"

#include <algorithm>

namespace tgi {
namespace {

struct BestJob final : Job {
    explicit BestJob(const BestCall& call) : call(call) {}

    int64_t chunks() const { return (call.peaks.panels + SHARE - 1) / SHARE; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * SHARE, last = std::min(first + SHARE, call.peaks.panels);
        for (int64_t row = 0; row < call.rows; row++)
            for (int64_t panel = first; panel < last; panel++)
                call.peaks.put(row, panel, some(row, panel * PANEL), some(row, panel * PANEL + 16));
    }

    // Sixteen scores of a row.
    __m512 some(int64_t row, int64_t at) const {
        const __mmask16 there = at + 16 <= call.size ? 0xffff : at >= call.size ? 0 : (1u << (call.size - at)) - 1;
        return _mm512_mask_loadu_ps(_mm512_set1_ps(LOWEST), there, call.scores + row * call.size + at);
    }

    static constexpr int64_t SHARE = 64;  // panels of a chunk
    const BestCall& call;
};

}  // namespace

void best(Team& team, const BestCall& call) {
    const BestJob job(call);
    team.run(job, job.chunks());
    gather(team, call.peaks, call.best);
}

}  // namespace tgi
