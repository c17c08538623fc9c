// The layers of a model, written down once as operations, and replayed for each step: see program.cpp.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention.h"
#include "head.h"
#include "linear.h"
#include "lora.h"
#include "norm.h"
#include "team.h"
#include "turn.h"

namespace tgi {

// What the adapters of a step add at one place of every layer. `plus` is null where none adds anything.
struct Place {
    float* plus;                  // [tokens, width]
    const Pair* const* adapters;  // [layers, adapters]
    const int64_t* bounds;        // [parts + 1] as in LoraCall
    int64_t width, parts;
};

// The tokens of a step that have an adapter, as in LoraCall, and what is added to them where.
struct Adapted {
    const int64_t* tokens;
    const int64_t* tiles;
    const int64_t* owners;
    int64_t count, adapters;
    Place places[4];
};

// The tokens behind which is drawn, where nothing but the best of their scores is needed.
struct Drawing {
    const int64_t* at;  // [count]
    int64_t count;
    void* room;  // of the Peaks
    Best best;
};

struct Inputs {
    bf16* rows;  // buffer 0: what the first layer takes, and the last one leaves
    const int64_t* positions;    // [tokens]
    const float* const* angles;  // of each rope, as in TurnCall
    bf16* const* caches;         // of each layer
    const Adapted* adapted;      // may be null
    const Drawing* drawing;      // may be null
    Step step;
};

// Operations take and leave rows in buffers, which have a row of fixed width for each token. Addresses in the calls that
// they are given are those of weights; what a step brings is filled in when it comes.
class Program {
  public:
    using Buffer = int64_t;

    // Buffers of these widths. Buffer 0 is the caller's, the others are scratch.
    explicit Program(std::vector<int64_t> widths);

    void norm(Buffer x, Buffer y, int64_t from, NormCall call);  // of the numbers from `from` on of each row
    // With what adapters add at a place from column `column` on; place -1: nowhere.
    void linear(Buffer x, Buffer other, Buffer y, int64_t place, int64_t column, LinearCall call);
    void lora(Buffer x, int64_t place, int64_t layer);  // comes before the products of its place
    void turn(Buffer x, int64_t rope, TurnCall call);
    void attend(Buffer qkv, Buffer y, int64_t layer, Cache cache, Attention call);
    void add(Buffer x, Buffer y, float scale);  // y + scale * x to y

    void head(Buffer x, Buffer y, NormCall norm, HeadCall head);  // of the tokens of `drawing`, if there is one; y is scratch

    // `clock`, unless null, is where the seconds of each operation are added.
    void run(Team& team, const Inputs& inputs, double* clock);

  private:
    struct Run {
        Team& team;
        const Inputs& inputs;
        const std::vector<bf16*>& buffers;
        const std::vector<Packed>& weights;
        int64_t tokens;

        // The weight of the product behind one; behind the last one the next step begins.
        const Packed* after(size_t product) const { return &weights[(product + 1) % weights.size()]; }
    };
    using Operation = std::function<void(const Run&)>;

    void need(int64_t tokens);

    std::vector<int64_t> widths_;
    std::vector<Operation> operations_;
    std::vector<Packed> weights_;  // of the products, in their order
    std::unique_ptr<bf16[]> scratch_;
    int64_t room_ = 0;  // tokens
    std::vector<bf16*> buffers_;
};

}  // namespace tgi
