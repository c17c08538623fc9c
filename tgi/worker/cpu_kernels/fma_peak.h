// Multiply-adds without memory, to measure the peak rate of the engine's instruction: a lower bound of the time of
// products.
#pragma once
#include <cstdint>

#include "thread_pool.h"

namespace tgi {

// Runs `chunks` chunks of multiply-adds on all threads. Returns the number of operations, two for each multiply-add.
int64_t fma_peak(ThreadPool& pool, int64_t chunks);

}  // namespace tgi
