// Products with packed weights of 8-bit codes in groups.
#include "linear_engine.h"

template void tgi::linear_of<tgi::FormatKind::eight_bit_groups>(ThreadPool& pool, const LinearCall& call);
template void tgi::grouped_linear_of<tgi::FormatKind::eight_bit_groups>(ThreadPool& pool, const LinearCall& call,
    const std::vector<WeightRows>& groups);
