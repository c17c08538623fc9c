// Products with packed weights of numbers without an encoding.
#include "linear_engine.h"

template void tgi::linear_of<tgi::FormatKind::numbers>(ThreadPool& pool, const LinearCall& call);
