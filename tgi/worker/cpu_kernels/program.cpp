// A step is one call. An operation is recorded as a call without the addresses and the number of its rows. Operations
// run one after the other; each divides its work among the thread pool.
#include "program.h"

#include <algorithm>
#include <chrono>

#include "simd.h"

namespace tgi {
namespace {

constexpr int64_t ALIGNED = 64 / sizeof(Element);  // elements of a cache line

struct AddJob final : Job {
    AddJob(const Element* x, Element* y, int64_t size, float scale) : x(x), y(y), size(size), scale(broadcast(scale)) {}

    int64_t chunks() const { return (size + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, size);
        for (int64_t at = chunk * CHUNK; at < last; at += LANES) {
            const int64_t count = last - at;
            alignas(64) Element scaled[LANES];  // rounded, as a separate tensor would be
            store(scaled, load_first(x + at, count) * scale);
            store_first(y + at, load_first(y + at, count) + load(scaled), count);
        }
    }

    static constexpr int64_t CHUNK = 16384;  // elements of a chunk
    const Element* x;
    Element* y;
    const int64_t size;
    const Float scale;
};

// y *= scale, or each row of y, of `width` columns, times a row of x.
struct ScaleJob final : Job {
    ScaleJob(Element* y, int64_t rows, int64_t width, float scale, const Element* x = nullptr, int64_t step = 0)
        : y(y), x(x), rows(rows), width(width), step(step), scale(broadcast(scale)) {}

    int64_t chunks() const { return (rows + CHUNK_ROWS - 1) / CHUNK_ROWS; }

    void run(int64_t chunk, int64_t) const override {
        for (int64_t row = chunk * CHUNK_ROWS; row < std::min((chunk + 1) * CHUNK_ROWS, rows); row++)
            for (int64_t at = 0; at < width; at += LANES) {
                const int64_t count = std::min(width - at, LANES);
                const Float factor = x ? load_first(x + row * step + at, count) : scale;
                store_first(y + row * width + at, load_first(y + row * width + at, count) * factor, count);
            }
    }

    static constexpr int64_t CHUNK_ROWS = 8;
    Element* const y;
    const Element* const x;
    const int64_t rows, width, step;
    const Float scale;
};

// The columns of y, of which there are `step`, that begin at y: x, of `width` columns.
struct CopyJob final : Job {
    CopyJob(const Element* x, Element* y, int64_t rows, int64_t width, int64_t step)
        : x(x), y(y), rows(rows), width(width), step(step) {}

    int64_t chunks() const { return (rows + CHUNK_ROWS - 1) / CHUNK_ROWS; }

    void run(int64_t chunk, int64_t) const override {
        for (int64_t row = chunk * CHUNK_ROWS; row < std::min((chunk + 1) * CHUNK_ROWS, rows); row++)
            std::copy_n(x + row * width, width, y + row * step);
    }

    static constexpr int64_t CHUNK_ROWS = 8;
    const Element* const x;
    Element* const y;
    const int64_t rows, width, step;
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Program::Program(std::vector<int64_t> widths) : widths_(std::move(widths)), buffers_(widths_.size()) {}

void Program::norm(Buffer x, Buffer y, int64_t from, NormCall call) {
    call.step = widths_[x];
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x] + from, call.y = run.buffers[y] + from, call.rows = run.tokens;
        tgi::norm(run.pool, call);
    });
}

void Program::linear(Buffer x, Buffer other, Buffer y, int64_t place, int64_t column, LinearCall call) {
    operations_.push_back([=, product = weights_.size()](const Run& run) mutable {
        call.x = run.buffers[x], call.other = run.buffers[other], call.y = run.buffers[y], call.rows = run.tokens;
        call.next = run.next_weight(product);
        call.plus = nullptr;
        if (place >= 0 && run.inputs.lora_step && run.inputs.lora_step->slots[place].plus) {
            call.plus = run.inputs.lora_step->slots[place].plus + column;
            call.plus_step = run.inputs.lora_step->slots[place].width;
        }
        tgi::linear(run.pool, call);
    });
    weights_.push_back(call.weight);
}

void Program::lora(Buffer x, int64_t place, int64_t layer) {
    operations_.push_back([=, inputs = widths_[x]](const Run& run) {
        if (!run.inputs.lora_step) return;
        const LoraStep& all = *run.inputs.lora_step;
        const LoraSlot& here = all.slots[place];
        if (!here.plus) return;
        tgi::lora(run.pool, {run.buffers[x], here.plus, all.tokens, all.tiles, all.owners,
                             here.adapters + layer * all.adapters, here.bounds, inputs, here.width, all.count,
                                 here.parts});
    });
}

void Program::rope(Buffer x, int64_t rope, int64_t from, RopeCall call) {
    call.stride = widths_[x];
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x] + from, call.tokens = run.tokens;
        call.angles = run.inputs.angles[rope], call.positions = run.inputs.positions;
        tgi::rope(run.pool, call);
    });
}

void Program::head_products(Buffer x, Buffer last, Buffer y, HeadProductsCall call) {
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x], call.y = run.buffers[y], call.rows = run.tokens;
        call.last = last < 0 ? nullptr : run.buffers[last];
        tgi::head_products(run.pool, call);
    });
}

void Program::attention(Buffer qkv, Buffer y, int64_t layer, KvCache cache, AttentionCall call) {
    operations_.push_back([=](const Run& run) mutable {
        const auto [at, group] = run.inputs.caches[layer];
        cache.at = at, cache.form = run.inputs.kv_form;
        AttentionBatch step = run.inputs.step;
        step.slots += group * run.tokens, step.pages += group * step.rows * step.width;
        call.qkv = run.buffers[qkv], call.y = run.buffers[y];
        tgi::attention(run.pool, cache, step, call);
    });
}

void Program::conv(Buffer x, Buffer y, int64_t window, ConvCall call) {
    call.x_step = widths_[x], call.y_step = widths_[y];
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x], call.y = run.buffers[y];
        call.window = (Element*)run.inputs.state->tensors[window];
        causal_conv(run.pool, run.state_rows(), call);
    });
}

void Program::delta_rule(Buffer x, Buffer ba, Buffer y, int64_t z, int64_t state, DeltaCall call) {
    call.x_step = call.z_step = widths_[x];
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x], call.z = call.x + z, call.ba = run.buffers[ba], call.y = run.buffers[y];
        call.state = (float*)run.inputs.state->tensors[state];
        tgi::delta_rule(run.pool, run.state_rows(), call);
    });
}

void Program::ssd(Buffer x, int64_t dt, Buffer y, int64_t state, SsdCall call) {
    call.x_step = call.dt_step = widths_[x];
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x], call.dt = call.x + dt, call.y = run.buffers[y];
        call.state = (float*)run.inputs.state->tensors[state];
        tgi::ssd(run.pool, run.state_rows(), call);
    });
}

void Program::gated_norm(Buffer y, Buffer x, int64_t z, GatedNormCall call) {
    call.z_step = widths_[x];
    operations_.push_back([=](const Run& run) mutable {
        call.y = run.buffers[y], call.z = run.buffers[x] + z, call.tokens = run.tokens;
        tgi::gated_norm(run.pool, call);
    });
}

void Program::sigmoid_gate(Buffer x, Buffer y) {
    operations_.push_back([=, width = widths_[x]](const Run& run) {
        tgi::sigmoid_gate(run.pool, run.buffers[x], run.buffers[y], run.tokens * width);
    });
}

void Program::experts(Buffer x, Buffer seen, Buffer y, const Experts& experts) {
    operations_.push_back([=, &experts](const Run& run) {
        run_experts(run.pool, experts, run.buffers[x], run.buffers[seen], run.buffers[y], run.tokens);
    });
}

void Program::add(Buffer x, Buffer y, float scale) {
    operations_.push_back([=, width = widths_[x]](const Run& run) {
        const AddJob job(run.buffers[x], run.buffers[y], run.tokens * width, scale);
        run.pool.run(job, job.chunks());
    });
}

void Program::scale(Buffer y, float scale) {
    operations_.push_back([=, width = widths_[y]](const Run& run) {
        const ScaleJob job(run.buffers[y], run.tokens, width, scale);
        run.pool.run(job, job.chunks());
    });
}

void Program::multiply(Buffer x, Buffer y, int64_t from) {
    operations_.push_back([=, width = widths_[y], step = widths_[x]](const Run& run) {
        const ScaleJob job(run.buffers[y], run.tokens, width, 1, run.buffers[x] + from, step);
        run.pool.run(job, job.chunks());
    });
}

void Program::copy(Buffer x, Buffer y, int64_t from) {
    operations_.push_back([=, width = widths_[x], step = widths_[y]](const Run& run) {
        const CopyJob job(run.buffers[x], run.buffers[y] + from, run.tokens, width, step);
        run.pool.run(job, job.chunks());
    });
}

void Program::all_reduce(Buffer x, RankGroup& group) {
    operations_.push_back([=, &group, width = widths_[x]](const Run& run) {
        group.all_reduce(run.pool, run.buffers[x], run.tokens * width);
    });
}

void Program::attend_images(Buffer queries, Buffer y, int64_t layer, KvCache cache, AttentionCall call) {
    operations_.push_back([=](const Run& run) mutable {
        cache.at = run.inputs.images->memory[layer];
        call.qkv = run.buffers[queries], call.y = run.buffers[y];
        tgi::attention(run.pool, cache, run.inputs.images->runs, call);
    });
}

void Program::copy_unseeing(Buffer x, Buffer y) {
    operations_.push_back([=, width = widths_[x]](const Run& run) {
        for (int64_t token = 0; token < run.tokens; token++)
            if (!run.inputs.images->sees[token])
                std::copy_n(run.buffers[x] + token * width, width, run.buffers[y] + token * width);
    });
}

void Program::add_features(Buffer y, int64_t level) {
    operations_.push_back([=, width = widths_[y]](const Run& run) {
        const ImageStep* const images = run.inputs.images;
        if (!images || level >= images->levels) return;
        for (int64_t at = 0; at < images->count; at++) {
            const Element* const added = images->features[level] + at * width;
            Element* const row = run.buffers[y] + images->tokens[at] * width;
            for (int64_t n = 0; n < width; n += LANES)
                store_first(row + n, load_first(row + n, width - n) + load_first(added + n, width - n), width - n);
        }
    });
}

void Program::head(Buffer x, Buffer y, NormCall norm, HeadCall head, VocabularyShards shards) {
    operations_.push_back([=, width = widths_[x], product = weights_.size()](const Run& run) mutable {
        if (!run.inputs.greedy_rows) return;
        const GreedyRows& greedy_rows = *run.inputs.greedy_rows;
        Element* const rows = run.buffers[y];
        for (int64_t row = 0; row < greedy_rows.count; row++)
            std::copy_n(run.buffers[x] + greedy_rows.at[row] * width, width, rows + row * width);
        norm.x = norm.y = rows, norm.rows = greedy_rows.count, norm.step = width;
        tgi::norm(run.pool, norm);
        head.x = rows, head.rows = greedy_rows.count, head.next = run.next_weight(product);
        head.shards = &shards;
        tgi::greedy_head(run.pool, head, greedy_rows.room, greedy_rows.best);
    });
    weights_.push_back(head.weight);
}

void Program::run(ThreadPool& pool, const StepInputs& inputs, double* clock) {
    const int64_t tokens = inputs.step.bounds[inputs.step.rows];
    reserve(tokens);
    buffers_[0] = inputs.rows;
    if (inputs.side) buffers_[1] = inputs.side;
    const Run run{pool, inputs, buffers_, weights_, tokens};
    double before = clock ? seconds() : 0;
    for (const Operation& operation : operations_) {
        operation(run);
        if (!clock) continue;
        const double now = seconds();
        *clock++ += now - before;
        before = now;
    }
}

// Makes room for this many tokens.
void Program::reserve(int64_t tokens) {
    if (tokens <= capacity_) return;
    capacity_ = (tokens + ALIGNED - 1) / ALIGNED * ALIGNED;  // a multiple of ALIGNED keeps every buffer aligned
    int64_t size = ALIGNED;
    for (size_t buffer = 1; buffer < widths_.size(); buffer++) size += capacity_ * widths_[buffer];
    scratch_.reset();
    scratch_.reset(new Element[size]);
    const auto start = reinterpret_cast<uintptr_t>(scratch_.get());
    Element* next = scratch_.get() + (64 - start % 64) % 64 / sizeof(Element);
    for (size_t buffer = 1; buffer < widths_.size(); buffer++) {
        buffers_[buffer] = next;
        next += capacity_ * widths_[buffer];
    }
}

}  // namespace tgi
