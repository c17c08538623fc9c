// Matrix products with packed weights: y = epilogue(x w^T + plus + bias). dot_linear.h and fma_linear.h compute them.
//
// Invariant: each row is summed over the inputs in one order, whatever the number of rows, so its result depends on
// nothing but the row.
#include "linear.h"

namespace tgi {

void linear(ThreadPool& pool, const LinearCall& call) {
    if (!call.rows) return;
    switch (call.weight.form.kind()) {
        case FormatKind::numbers: return linear_of<FormatKind::numbers>(pool, call);
        case FormatKind::eight_bit_groups: return linear_of<FormatKind::eight_bit_groups>(pool, call);
        case FormatKind::four_bit_groups: return linear_of<FormatKind::four_bit_groups>(pool, call);
        case FormatKind::four_bit_floats: return linear_of<FormatKind::four_bit_floats>(pool, call);
#if TGI_DOT_ENGINE
        case FormatKind::mxfp4: return linear_of<FormatKind::mxfp4>(pool, call);
#endif
        case FormatKind::integers: return linear_of<FormatKind::integers>(pool, call);
    }
}

void grouped_linear(ThreadPool& pool, const LinearCall& call, const std::vector<WeightRows>& groups) {
    if (!call.rows) return;
    switch (call.weight.form.kind()) {
        case FormatKind::numbers: return grouped_linear_of<FormatKind::numbers>(pool, call, groups);
        case FormatKind::eight_bit_groups: return grouped_linear_of<FormatKind::eight_bit_groups>(pool, call, groups);
        case FormatKind::four_bit_groups: return grouped_linear_of<FormatKind::four_bit_groups>(pool, call, groups);
        case FormatKind::four_bit_floats: return grouped_linear_of<FormatKind::four_bit_floats>(pool, call, groups);
#if TGI_DOT_ENGINE
        case FormatKind::mxfp4: return grouped_linear_of<FormatKind::mxfp4>(pool, call, groups);
#endif
        case FormatKind::integers: return grouped_linear_of<FormatKind::integers>(pool, call, groups);
    }
}

}  // namespace tgi
