// Products with packed weights of integers with one scale for each output.
#include "linear_engine.h"

template void tgi::linear_of<tgi::FormatKind::integers>(ThreadPool& pool, const LinearCall& call);
template void tgi::grouped_linear_of<tgi::FormatKind::integers>(ThreadPool& pool, const LinearCall& call,
    const std::vector<WeightRows>& groups);
