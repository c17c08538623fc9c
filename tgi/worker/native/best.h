// See best.cpp.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

// Of each row of scores its highest one, the first among equals, and log(sum over all of e^(score - highest)).
struct BestCall {
    const float* scores;  // [rows, size]
    int64_t* at;          // [rows]
    float* logs;          // [rows]
    int64_t rows, size;
};

void best(Team& team, const BestCall& call);

}  // namespace tgi
