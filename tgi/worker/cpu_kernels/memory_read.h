// Reads memory without computing, to measure the memory bandwidth: a lower bound of the time of any computation on it.
#pragma once
#include <cstdint>

#include "thread_pool.h"

namespace tgi {

// `bytes` is a multiple of 64. Returns the sum of all int64 numbers, so that the compiler keeps the reads.
int64_t read_memory(ThreadPool& pool, const void* at, int64_t bytes);

}  // namespace tgi
