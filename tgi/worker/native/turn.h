// Rotary positions: turns pairs of numbers of each head.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

using bf16 = uint16_t;

// (a, b) becomes (a cos - b sin, b cos + a sin), for the pairs of the first `turned` numbers of a head: numbers i and
// i + turned / 2, or 2 i and 2 i + 1 where `neighbours`.
struct TurnCall {
    bf16* x;                   // [tokens, stride], in place; the first `heads` heads of each token are turned
    const float* angles;       // [.., 2, turned] of each position the cos, then the sin
    const int64_t* positions;  // [tokens]
    int64_t tokens, stride, heads, head_dim, turned;
    bool neighbours;
};

void turn(Team& team, const TurnCall& call);

}  // namespace tgi
