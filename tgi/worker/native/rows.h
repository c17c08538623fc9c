// Single rows of packed weights, as numbers: what an embedding that is also the head is asked for.
#pragma once
#include "packed.h"

namespace tgi {

struct RowsCall {
    Packed weight;
    const int64_t* ids;  // [count], below weight.outputs
    bf16* y;             // [count][inputs]
    int64_t count;
};

void rows(Team& team, const RowsCall& call);

}  // namespace tgi
