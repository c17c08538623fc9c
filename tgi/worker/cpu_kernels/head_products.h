// Products of each head with a weight of its own. See head_products.cpp.
#pragma once
#include <cstdint>

#include "packed_weight.h"
#include "thread_pool.h"

namespace tgi {

// y[t][h] = [weight[h] x[t][h][: inputs], x[t][h][inputs :]]: the last `kept` elements of a head follow its product.
struct HeadProductsCall {
    const Element* x;  // [rows, heads * (inputs + kept)]
    const Element* last;  // [rows, outputs + kept], one more head of y; may be null
    Element* y;  // [rows, (heads + 1 if `last`) * (outputs + kept)]
    const uint8_t* const* weights;  // of each head
    PackedWeight shape;  // of each weight; its address is not used
    int64_t heads, kept, rows;
};

void head_products(ThreadPool& pool, const HeadProductsCall& call);

}  // namespace tgi
