// See head.cpp.
#pragma once
#include "linear.h"
#include "peaks.h"
#include "team.h"

namespace tgi {

struct HeadCall {
    const bf16* x;  // [rows, inputs]
    Packed weight;
    const float* bias;  // [outputs], or null
    Scoring scoring;
    int64_t rows;
    const Packed* next = nullptr;  // as in LinearCall
};

// All scores, float32 [rows, outputs].
void scores(Team& team, const HeadCall& call, float* wide);
// The best of them, which are not kept; `peaks` is room for all rows.
void head(Team& team, const HeadCall& call, const Peaks& peaks, const Best& best);

}  // namespace tgi
