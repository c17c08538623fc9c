// The layers of a model, recorded once as operations and run for each step. See program.cpp.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention.h"
#include "causal_conv.h"
#include "delta_rule.h"
#include "experts.h"
#include "gate.h"
#include "head.h"
#include "head_products.h"
#include "linear.h"
#include "lora.h"
#include "norm.h"
#include "rank_group.h"
#include "thread_pool.h"
#include "rope.h"
#include "ssd.h"

namespace tgi {

// What the adapters of a step add to the projections of one input, in every layer. `plus` is null if no adapter changes
// them.
struct LoraSlot {
    float* plus;  // [tokens, width]
    const LoraPair* const* adapters;  // [layers, adapters]
    const int64_t* bounds;  // [parts + 1] as in LoraCall
    int64_t width, parts;
};

// The tokens of a step that have an adapter, as in LoraCall, and their LoRA sums.
struct LoraStep {
    const int64_t* tokens;
    const int64_t* tiles;
    const int64_t* owners;
    int64_t count, adapters;
    LoraSlot slots[4];
};

// The tokens whose greedy successors are computed.
struct GreedyRows {
    const int64_t* at;  // [count]
    int64_t count;
    void* room;  // of the BlockMaxima
    GreedyTokens best;
};

// The cache of a layer, and its KV group: group g has the g-th part of the slot mapping and of the page tables.
struct LayerCache {
    void* at;
    int64_t group;
};

// The slots of the step's rows in the state of recurrent layers.
struct StateStep {
    const int32_t* slots;  // [rows]
    int64_t slot_bytes;
    void* const* tensors;  // the address in slot 0 of each tensor of each recurrent layer
    const int32_t* kept;  // as in StateRows
};

// What the tokens of a step get of images.
struct ImageStep {
    // Of attention to images; null if no token sees one.
    const bool* sees;  // [tokens]
    void* const* memory;  // of each layer that attends to images, a KvCache of activations
    AttentionBatch runs;  // consecutive tokens that see the same
    // Of features that are added behind the first layers.
    const int64_t* tokens;  // [count]
    int64_t count, levels;
    const Element* const* features;  // [levels]: [count, columns]
};

struct StepInputs {
    Element* rows;  // buffer 0: input of the first layer, output of the last one
    const int64_t* positions;  // [tokens]
    const float* const* angles;  // of each rope, as in RopeCall
    const LayerCache* caches;  // of each layer
    KvForm kv_form;
    const LoraStep* lora_step;  // may be null
    const GreedyRows* greedy_rows;  // may be null
    AttentionBatch step;  // of the first KV group
    const StateStep* state;  // null if no layer is recurrent
    Element* side;  // buffer 1, if not null: what layers read and write besides the rows
    const ImageStep* images;  // null: operations on images do nothing
};

// Operations read and write buffers, which have a row of fixed width for each token. The calls that are recorded have
// the addresses of weights; `run` fills in the addresses of the step.
class Program {
  public:
    using Buffer = int64_t;

    // Buffers of these widths. Buffer 0, and 1 if a step has StepInputs.side, belong to the caller, the others are
    // scratch memory.
    explicit Program(std::vector<int64_t> widths);

    void norm(Buffer x, Buffer y, int64_t from, NormCall call);  // of the columns from `from` on
    // Adds the LoRA sums of a slot from column `column` on; place -1: none.
    void linear(Buffer x, Buffer other, Buffer y, int64_t place, int64_t column, LinearCall call);
    void lora(Buffer x, int64_t place, int64_t layer);  // recorded before the products that add its sums
    void rope(Buffer x, int64_t rope, int64_t from, RopeCall call);  // from element `from` of each head on
    void head_products(Buffer x, Buffer last, Buffer y, HeadProductsCall call);  // last -1: none
    void attention(Buffer qkv, Buffer y, int64_t layer, KvCache cache, AttentionCall call);
    void conv(Buffer x, Buffer y, int64_t window, ConvCall call);  // `window`: number of the state tensor
    // x has the columns of DeltaCall.x and, from `z` on, those of DeltaCall.z; `state`: number of the state tensor.
    void delta_rule(Buffer x, Buffer ba, Buffer y, int64_t z, int64_t state, DeltaCall call);
    // x has the columns of SsdCall.x and, from `dt` on, those of SsdCall.dt; `state`: number of the state tensor.
    void ssd(Buffer x, int64_t dt, Buffer y, int64_t state, SsdCall call);
    void gated_norm(Buffer y, Buffer x, int64_t z, GatedNormCall call);  // by the columns of x from `z` on
    void sigmoid_gate(Buffer x, Buffer y);  // y *= sigmoid(x)
    void experts(Buffer x, Buffer seen, Buffer y, const Experts& experts);
    void add(Buffer x, Buffer y, float scale);  // y += scale * x
    void scale(Buffer y, float scale);  // y *= scale
    void multiply(Buffer x, Buffer y, int64_t from);  // y *= the columns of x from `from` on
    void copy(Buffer x, Buffer y, int64_t from);  // the columns of y from `from` on = x
    void all_reduce(Buffer x, RankGroup& group);  // x = the sum of x over all ranks

    // Attention to what the tokens see of images in the layer of this number among those that attend to them.
    void attend_images(Buffer queries, Buffer y, int64_t layer, KvCache cache, AttentionCall call);
    void copy_unseeing(Buffer x, Buffer y);  // y = x for tokens that see no image
    void add_features(Buffer y, int64_t level);  // of ImageStep

    // Of the tokens of `greedy_rows`, if not null; y is scratch
    void head(Buffer x, Buffer y, NormCall norm, HeadCall head, VocabularyShards shards);

    // `clock`, if not null, is an array to which the seconds of each operation are added.
    void run(ThreadPool& pool, const StepInputs& inputs, double* clock);

  private:
    struct Run {
        ThreadPool& pool;
        const StepInputs& inputs;
        const std::vector<Element*>& buffers;
        const std::vector<PackedWeight>& weights;
        int64_t tokens;

        StateRows state_rows() const {
            const AttentionBatch& step = inputs.step;
            const StateStep& state = *inputs.state;
            return {state.slots, step.bounds, step.context_lengths, step.rows, state.slot_bytes, state.kept};
        }

        // The weight of the product after this one; the last product is followed by the next step.
        const PackedWeight* next_weight(size_t product) const { return &weights[(product + 1) % weights.size()]; }
    };
    using Operation = std::function<void(const Run&)>;

    void reserve(int64_t tokens);

    std::vector<int64_t> widths_;
    std::vector<Operation> operations_;
    std::vector<PackedWeight> weights_;  // of the products, in their order
    std::unique_ptr<Element[]> scratch_;
    int64_t capacity_ = 0;  // tokens
    std::vector<Element*> buffers_;
};

}  // namespace tgi
