// What is left of a row of scores for whoever wants the likeliest token and its probability alone.
//
// Scores are gathered panel by panel, and panels in their order, so a row's result has the same bits whether its scores
// are in memory or just leave a product, and whoever computes them. NaN counts as minus infinity.
#pragma once
#include <cstdint>
#include <limits>

#include "packed.h"
#include "team.h"
#include "vectors.h"

namespace tgi {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Of each row of scores its highest one, the first among equals, and -log(sum over all of e^(score - highest)), which is no
// number if that is infinite.
struct Best {
    int64_t* at;      // [rows]
    float* highest;   // [rows]
    float* logprobs;  // [rows]
};

// e^x for x <= 0, off by less than 1e-6 of it where that counts beside 1.
inline __m512 share(__m512 x) { return power(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f))); }

// Of each panel of a row's scores the highest one, where the first as high stands in the row, and the sum over the panel of
// e^(score - highest).
struct Peaks {
    // In memory for BYTES of each panel and row.
    Peaks(void* memory, int64_t rows, int64_t panels)
        : highest((float*)memory), sums(highest + rows * panels), at((int32_t*)(sums + rows * panels)), rows(rows),
          panels(panels) {}

    static constexpr int64_t BYTES = sizeof(float) + sizeof(float) + sizeof(int32_t);

    // A panel's scores of a row; those behind the last one are LOWEST.
    void put(int64_t row, int64_t panel, __m512 left, __m512 right) const {
        const __m512 least = _mm512_set1_ps(LOWEST);
        left = _mm512_max_ps(left, least), right = _mm512_max_ps(right, least);  // of a NaN and a number it is the second
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(left, right));
        const __m512 all = _mm512_set1_ps(most), base = finite(all);
        const uint32_t equal = _mm512_cmpeq_ps_mask(left, all) | _mm512_cmpeq_ps_mask(right, all) << 16;
        const int64_t to = panel * rows + row;
        highest[to] = most;
        sums[to] = _mm512_reduce_add_ps(_mm512_add_ps(share(_mm512_sub_ps(left, base)), share(_mm512_sub_ps(right, base))));
        at[to] = panel * PANEL + __builtin_ctz(equal);
    }

    // What scores are compared with: the highest, or 0 where that is LOWEST, so that nothing is left of such scores.
    static __m512 finite(__m512 most) {
        return _mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask(most, _mm512_set1_ps(LOWEST)), most);
    }

    float *highest, *sums;  // [panels, rows]
    int32_t* at;
    int64_t rows, panels;
};

// Gathers all rows.
void gather(Team& team, const Peaks& peaks, const Best& best);

}  // namespace tgi
