// y *= sigmoid(x), in float32, rounded once.
#pragma once
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

void sigmoid_gate(ThreadPool& pool, const Element* x, Element* y, int64_t size);

}  // namespace tgi
