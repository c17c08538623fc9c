// Products with packed weights of 4-bit floats in groups.
#include "linear_engine.h"

template void tgi::linear_of<tgi::FormatKind::four_bit_floats>(ThreadPool& pool, const LinearCall& call);
template void tgi::grouped_linear_of<tgi::FormatKind::four_bit_floats>(ThreadPool& pool, const LinearCall& call,
    const std::vector<WeightRows>& groups);
