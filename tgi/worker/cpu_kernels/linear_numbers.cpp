// Products with packed weights of numbers without an encoding.
#include "linear_engine.h"

template void tgi::linear_of<tgi::FormatKind::numbers>(ThreadPool& pool, const LinearCall& call);
template void tgi::grouped_linear_of<tgi::FormatKind::numbers>(ThreadPool& pool, const LinearCall& call,
    const std::vector<WeightRows>& groups);
