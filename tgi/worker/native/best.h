// See best.cpp.
#pragma once
#include <cstdint>

#include "peaks.h"
#include "team.h"

namespace tgi {

struct BestCall {
    const float* scores;  // [rows, size]
    Peaks peaks;          // room for all of them
    Best best;
    int64_t rows, size;
};

void best(Team& team, const BestCall& call);

}  // namespace tgi
