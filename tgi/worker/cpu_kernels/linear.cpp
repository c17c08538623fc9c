// Matrix products with packed weights: y = epilogue(x w^T + plus + bias). dot_linear.h and fma_linear.h compute them.
//
// Invariant: each row is summed over the inputs in one order, whatever the number of rows, so its result depends on
// nothing but the row.
#include "linear.h"

#if TGI_DOT_ENGINE
#include "dot_linear.h"
#else
#include "fma_linear.h"
#endif

namespace tgi {

void linear(ThreadPool& pool, const LinearCall& call) {
    if (call.rows) run_linear(pool, call);
}

}  // namespace tgi
