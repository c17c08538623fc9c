// Reads memory and does nothing with it: what any computation on so many bytes takes at least. For measurements.
#pragma once
#include <cstdint>

#include "team.h"

namespace tgi {

// Bytes are a multiple of 64. Returns a number that depends on them all, so that the compiler reads them.
int64_t read(Team& team, const void* at, int64_t bytes);

}  // namespace tgi
