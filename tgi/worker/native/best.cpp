// The highest score of each row and what makes logprobs of scores: a row at a time, so none depends on the others.
#include "best.h"

#include <cmath>
#include <limits>

#include "vectors.h"

namespace tgi {
namespace {

constexpr float LEAST = -std::numeric_limits<float>::infinity();

struct BestJob final : Job {
    explicit BestJob(const BestCall& call) : call(call) {}

    void run(int64_t row) const override {
        const float* scores = call.scores + row * call.size;
        __m512 most = _mm512_set1_ps(LEAST), sum = _mm512_setzero_ps();
        for (int64_t at = 0; at < call.size; at += 16) most = _mm512_max_ps(some(scores, at), most);
        const __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        int64_t first = -1;
        for (int64_t at = 0; at < call.size; at += 16) {
            const __m512 here = some(scores, at);
            const __mmask16 equal = _mm512_cmpeq_ps_mask(here, highest);
            if (first < 0 && equal) first = at + __builtin_ctz(equal);
            sum = _mm512_add_ps(sum, exp(_mm512_sub_ps(here, highest)));
        }
        call.at[row] = first < 0 || first >= call.size ? 0 : first;  // 0 where none is a number
        call.logs[row] = std::log(_mm512_reduce_add_ps(sum));
    }

    __m512 some(const float* scores, int64_t at) const {
        const __mmask16 there = at + 16 <= call.size ? 0xffff : (1u << (call.size - at)) - 1;
        return _mm512_mask_loadu_ps(_mm512_set1_ps(LEAST), there, scores + at);
    }

    const BestCall& call;
};

}  // namespace

void best(Team& team, const BestCall& call) { team.run(BestJob(call), call.rows); }

}  // namespace tgi
