// See peaks.h.
#include "peaks.h"

#include <algorithm>
#include <cmath>

namespace tgi {
namespace {

// Sixteen rows are a chunk. Each sums its panels four by four, which is quicker and more exact than one by one.
struct GatherJob final : Job {
    GatherJob(const Peaks& peaks, const Best& best) : peaks(peaks), best(best) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t first = chunk * 16, rows = std::min<int64_t>(peaks.rows - first, 16);
        const __mmask16 there = (1u << rows) - 1;
        const auto each = [&](const float* column, int64_t panel) {
            return _mm512_maskz_loadu_ps(there, column + panel * peaks.rows + first);
        };
        __m512 most = _mm512_set1_ps(LOWEST), sums[4] = {};
        __m512i at = _mm512_setzero_si512();
        for (int64_t panel = 0; panel < peaks.panels; panel++) {
            const __m512 here = each(peaks.highest, panel);
            const __mmask16 higher = _mm512_cmp_ps_mask(here, most, _CMP_GT_OQ);
            most = _mm512_max_ps(here, most);
            at = _mm512_mask_mov_epi32(at, higher, _mm512_castps_si512(each((const float*)peaks.at, panel)));
        }
        const __m512 base = Peaks::finite(most);
        for (int64_t panel = 0; panel < peaks.panels; panel++) {
            const __m512 part = share(_mm512_sub_ps(each(peaks.highest, panel), base));
            sums[panel % 4] = _mm512_fmadd_ps(part, each(peaks.sums, panel), sums[panel % 4]);
        }
        const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
        alignas(64) float total[16];
        _mm512_store_ps(total, sum);
        _mm512_mask_storeu_ps(best.highest + first, there, most);
        _mm512_mask_storeu_epi64(best.at + first, there, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(at)));
        _mm512_mask_storeu_epi64(best.at + first + 8, there >> 8, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(at, 1)));
        for (int64_t row = first; row < first + rows; row++)
            best.logprobs[row] = best.highest[row] - best.highest[row] - std::log(total[row - first]);
    }

    const Peaks& peaks;
    const Best& best;
};

}  // namespace

void gather(Team& team, const Peaks& peaks, const Best& best) {
    team.run(GatherJob(peaks, best), (peaks.rows + 15) / 16);
}

}  // namespace tgi
