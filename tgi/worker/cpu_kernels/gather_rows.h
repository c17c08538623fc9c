// Embedding lookup: single rows of a packed weight, dequantized.
#pragma once
#include "packed_weight.h"

namespace tgi {

struct GatherRowsCall {
    PackedWeight weight;
    const int64_t* ids;  // [count]
    Element* y;  // [count][inputs]
    int64_t count;
    int64_t first;  // the id of the weight's first row; an id without a row gets zeros
};

void gather_rows(ThreadPool& pool, const GatherRowsCall& call);

}  // namespace tgi
