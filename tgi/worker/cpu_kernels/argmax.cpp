// See argmax.h.
#include "argmax.h"

#include <algorithm>
#include <cmath>

namespace tgi {
namespace {

// A chunk is 16 rows. The sums of a row are accumulated in four lanes, which is faster and more exact than one.
struct ReduceJob final : Job {
    ReduceJob(const BlockMaxima& block_maxima, const GreedyTokens& best) : block_maxima(block_maxima), best(best) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * LANES, rows = std::min(block_maxima.rows - first, LANES);
        const auto each = [&](const void* line) { return load_first((const float*)line + first, rows); };
        Float most = broadcast(LOWEST), sums[4] = {};
        Int at = as_int(zeros());
        for (int64_t panel = 0; panel < block_maxima.panels; panel++) {
            const Float here = each(block_maxima.highest(panel));
            at = select(here > most, as_int(each(block_maxima.at(panel))), at);
            most = max(here, most);
        }
        const Float base = BlockMaxima::finite(most);
        for (int64_t panel = 0; panel < block_maxima.panels; panel++) {
            const Float part = exp_nonpositive(each(block_maxima.highest(panel)) - base);
            sums[panel % 4] = fma(part, each(block_maxima.sums(panel)), sums[panel % 4]);
        }
        alignas(64) float total[LANES];
        alignas(64) int32_t ids[LANES];
        store(total, (sums[0] + sums[1]) + (sums[2] + sums[3]));
        store(ids, at);
        store_first(best.highest + first, most, rows);
        for (int64_t row = first; row < first + rows; row++) {
            best.at[row] = ids[row - first];
            best.logprobs[row] = best.highest[row] - best.highest[row] - std::log(total[row - first]);
        }
    }

    const BlockMaxima& block_maxima;
    const GreedyTokens& best;
};

struct BlockMaximaJob final : Job {
    explicit BlockMaximaJob(const ArgmaxCall& call) : call(call) {}

    int64_t chunks() const { return (call.block_maxima.panels + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * CHUNK, last = std::min(first + CHUNK, call.block_maxima.panels);
        for (int64_t row = 0; row < call.rows; row++)
            for (int64_t panel = first; panel < last; panel++)
                call.block_maxima.set(row, panel, load_logits(row, panel * PANEL),
                    load_logits(row, panel * PANEL + LANES));
    }

    // Sixteen logits of a row.
    Float load_logits(int64_t row, int64_t at) const {
        const int64_t count = std::max<int64_t>(call.size - at, 0);
        if (count >= LANES) return load(call.logits + row * call.size + at);
        return select(first_lanes(count), load_first(call.logits + row * call.size + at, count), broadcast(LOWEST));
    }

    static constexpr int64_t CHUNK = 64;  // panels of a chunk
    const ArgmaxCall& call;
};

}  // namespace

void reduce_blocks(ThreadPool& pool, const BlockMaxima& block_maxima, const GreedyTokens& best) {
    pool.run(ReduceJob(block_maxima, best), (block_maxima.rows + LANES - 1) / LANES);
}

void argmax(ThreadPool& pool, const ArgmaxCall& call) {
    const BlockMaximaJob job(call);
    pool.run(job, job.chunks());
    reduce_blocks(pool, call.block_maxima, call.result);
}

}  // namespace tgi
