// A mixture of experts: the router's choice for each row, the experts' products, and their weighted sum. See experts.cpp.
#pragma once
#include <cstdint>
#include <vector>

#include "linear.h"
#include "packed_weight.h"
#include "thread_pool.h"

namespace tgi {

enum class RouterScore : int64_t { SOFTMAX = 0, SIGMOID = 1, SPARSEMIXER = 2 };

// How a row's experts are chosen: RouterConfig of decoder_config.py.
struct RouterRule {
    int64_t experts, top_k, groups, top_groups;
    RouterScore score;
    bool normalized;
    float scale;
    const float* bias;  // [experts] added for the choice alone; may be null
    int64_t group_best;  // 1 or 2: of a group, so many of the best count
    float jitter;  // of SPARSEMIXER
    bool scales_inputs;  // the weights multiply the experts' inputs, not their outputs
    const float* expert_scales;  // [experts] factors of the weights; may be null
};

// An MLP: down(f(gate x) * up x), or down(f(up x)) if the first weight is a single one.
struct ExpertMlp {
    PackedWeight up, down;
    const float *up_bias, *down_bias;  // may be null
    Epilogue activation;
};

// All experts have weights of one shape and format. The parts of a mixture that every row uses have `at` null if the
// model has none.
struct Experts {
    RouterRule rule;
    PackedWeight router;  // [experts, hidden]
    const float* router_bias;  // [experts], may be null
    ExpertMlp shape;  // of each expert; its addresses are not used
    std::vector<const uint8_t*> up, down;  // of each expert
    std::vector<const float*> up_bias, down_bias;
    ExpertMlp shared;
    PackedWeight shared_gate;  // [1, hidden]
};

// y = sum of weight * expert(x) over the experts of each row, plus the shared expert; x and y are [rows, hidden]. The
// router chooses by `seen`, which may be x.
void run_experts(ThreadPool& pool, const Experts& experts, const Element* x, const Element* seen, Element* y,
    int64_t rows);

}  // namespace tgi
