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
        const int64_t first = chunk * 16, rows = std::min<int64_t>(block_maxima.rows - first, 16);
        const __mmask16 there = (1u << rows) - 1;
        const auto each = [&](const float* column, int64_t panel) {
            return _mm512_maskz_loadu_ps(there, column + panel * block_maxima.rows + first);
        };
        __m512 most = _mm512_set1_ps(LOWEST), sums[4] = {};
        __m512i at = _mm512_setzero_si512();
        for (int64_t panel = 0; panel < block_maxima.panels; panel++) {
            const __m512 here = each(block_maxima.highest, panel);
            const __mmask16 higher = _mm512_cmp_ps_mask(here, most, _CMP_GT_OQ);
            most = _mm512_max_ps(here, most);
            at = _mm512_mask_mov_epi32(at, higher, _mm512_castps_si512(each((const float*)block_maxima.at, panel)));
        }
        const __m512 base = BlockMaxima::finite(most);
        for (int64_t panel = 0; panel < block_maxima.panels; panel++) {
            const __m512 part = exp_nonpositive(_mm512_sub_ps(each(block_maxima.highest, panel), base));
            sums[panel % 4] = _mm512_fmadd_ps(part, each(block_maxima.sums, panel), sums[panel % 4]);
        }
        const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
        alignas(64) float total[16];
        _mm512_store_ps(total, sum);
        _mm512_mask_storeu_ps(best.highest + first, there, most);
        _mm512_mask_storeu_epi64(best.at + first, there, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(at)));
        _mm512_mask_storeu_epi64(best.at + first + 8, there >> 8, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(at,
            1)));
        for (int64_t row = first; row < first + rows; row++)
            best.logprobs[row] = best.highest[row] - best.highest[row] - std::log(total[row - first]);
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
                call.block_maxima.set(row, panel, load_logits(row, panel * PANEL), load_logits(row,
                    panel * PANEL + 16));
    }

    // Sixteen logits of a row.
    __m512 load_logits(int64_t row, int64_t at) const {
        const __mmask16 mask = at + 16 <= call.size ? 0xffff : at >= call.size ? 0 : (1u << (call.size - at)) - 1;
        return _mm512_mask_loadu_ps(_mm512_set1_ps(LOWEST), mask, call.logits + row * call.size + at);
    }

    static constexpr int64_t CHUNK = 64;  // panels of a chunk
    const ArgmaxCall& call;
};

}  // namespace

void reduce_blocks(ThreadPool& pool, const BlockMaxima& block_maxima, const GreedyTokens& best) {
    pool.run(ReduceJob(block_maxima, best), (block_maxima.rows + 15) / 16);
}

void argmax(ThreadPool& pool, const ArgmaxCall& call) {
    const BlockMaximaJob job(call);
    pool.run(job, job.chunks());
    reduce_blocks(pool, call.block_maxima, call.result);
}

}  // namespace tgi
