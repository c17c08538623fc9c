// Embedding lookup: single rows of a packed weight, dequantized.
#pragma once
#include "packed_weight.h"

namespace tgi {

struct GatherRowsCall {
    PackedWeight weight;
    const int64_t* ids;  // [count], below weight.outputs
    Element* y;  // [count][inputs]
    int64_t count;
};

void gather_rows(ThreadPool& pool, const GatherRowsCall& call);

}  // namespace tgi
