// A step is one call: what an operation computes on is known but for the addresses of its rows and their number, so it is
// kept as a call with these left out. Operations run one after the other; each divides its work among the team.
#include "program.h"

#include <algorithm>
#include <chrono>

#include "vectors.h"

namespace tgi {
namespace {

constexpr int64_t ALIGNED = 32;  // numbers: a cache line

struct AddJob final : Job {
    AddJob(const bf16* x, bf16* y, int64_t size, float scale) : x(x), y(y), size(size), scale(_mm512_set1_ps(scale)) {}

    int64_t chunks() const { return (size + SHARE - 1) / SHARE; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * SHARE, size);
        for (int64_t at = chunk * SHARE; at < last; at += 16) {
            alignas(32) bf16 scaled[16];  // is rounded, as it would be as a tensor of its own
            store(scaled, _mm512_mul_ps(load(x + at), scale));
            store(y + at, _mm512_add_ps(load(y + at), load(scaled)));
        }
    }

    static constexpr int64_t SHARE = 16384;  // numbers of a chunk
    const bf16* x;
    bf16* y;
    const int64_t size;  // a multiple of 16
    const __m512 scale;
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Program::Program(std::vector<int64_t> widths) : widths_(std::move(widths)), buffers_(widths_.size()) {}

void Program::norm(Buffer x, Buffer y, int64_t from, NormCall call) {
    call.step = widths_[x];
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x] + from, call.y = run.buffers[y] + from, call.rows = run.tokens;
        tgi::norm(run.team, call);
    });
}

void Program::linear(Buffer x, Buffer other, Buffer y, int64_t place, int64_t column, LinearCall call) {
    operations_.push_back([=, product = weights_.size()](const Run& run) mutable {
        call.x = run.buffers[x], call.other = run.buffers[other], call.y = run.buffers[y], call.rows = run.tokens;
        call.next = run.after(product);
        call.plus = nullptr;
        if (place >= 0 && run.inputs.adapted && run.inputs.adapted->places[place].plus) {
            call.plus = run.inputs.adapted->places[place].plus + column;
            call.plus_step = run.inputs.adapted->places[place].width;
        }
        tgi::linear(run.team, call);
    });
    weights_.push_back(call.weight);
}

void Program::lora(Buffer x, int64_t place, int64_t layer) {
    operations_.push_back([=, inputs = widths_[x]](const Run& run) {
        if (!run.inputs.adapted) return;
        const Adapted& all = *run.inputs.adapted;
        const Place& here = all.places[place];
        if (!here.plus) return;
        tgi::lora(run.team, {run.buffers[x], here.plus, all.tokens, all.tiles, all.owners,
                             here.adapters + layer * all.adapters, here.bounds, inputs, here.width, all.count, here.parts});
    });
}

void Program::turn(Buffer x, int64_t rope, TurnCall call) {
    call.stride = widths_[x];
    operations_.push_back([=](const Run& run) mutable {
        call.x = run.buffers[x], call.tokens = run.tokens;
        call.angles = run.inputs.angles[rope], call.positions = run.inputs.positions;
        tgi::turn(run.team, call);
    });
}

void Program::attend(Buffer qkv, Buffer y, int64_t layer, Cache cache, Attention call) {
    operations_.push_back([=](const Run& run) mutable {
        cache.at = run.inputs.caches[layer];
        call.qkv = run.buffers[qkv], call.y = run.buffers[y];
        tgi::attend(run.team, cache, run.inputs.step, call);
    });
}

void Program::add(Buffer x, Buffer y, float scale) {
    operations_.push_back([=, width = widths_[x]](const Run& run) {
        const AddJob job(run.buffers[x], run.buffers[y], run.tokens * width, scale);
        run.team.run(job, job.chunks());
    });
}

void Program::head(Buffer x, Buffer y, NormCall norm, HeadCall head) {
    operations_.push_back([=, width = widths_[x], product = weights_.size()](const Run& run) mutable {
        if (!run.inputs.drawing) return;
        const Drawing& drawing = *run.inputs.drawing;
        bf16* const rows = run.buffers[y];
        for (int64_t row = 0; row < drawing.count; row++)
            std::copy_n(run.buffers[x] + drawing.at[row] * width, width, rows + row * width);
        norm.x = norm.y = rows, norm.rows = drawing.count, norm.step = width;
        tgi::norm(run.team, norm);
        head.x = rows, head.rows = drawing.count, head.next = run.after(product);
        tgi::head(run.team, head, Peaks(drawing.room, drawing.count, head.weight.panels()), drawing.best);
    });
    weights_.push_back(head.weight);
}

void Program::run(Team& team, const Inputs& inputs, double* clock) {
    const int64_t tokens = inputs.step.bounds[inputs.step.rows];
    need(tokens);
    buffers_[0] = inputs.rows;
    const Run run{team, inputs, buffers_, weights_, tokens};
    double before = clock ? seconds() : 0;
    for (const Operation& operation : operations_) {
        operation(run);
        if (!clock) continue;
        const double now = seconds();
        *clock++ += now - before;
        before = now;
    }
}

// Makes room for so many tokens.
void Program::need(int64_t tokens) {
    if (tokens <= room_) return;
    room_ = (tokens + ALIGNED - 1) / ALIGNED * ALIGNED;  // so that every buffer is aligned
    int64_t size = ALIGNED;
    for (size_t buffer = 1; buffer < widths_.size(); buffer++) size += room_ * widths_[buffer];
    scratch_.reset();
    scratch_.reset(new bf16[size]);
    const auto start = reinterpret_cast<uintptr_t>(scratch_.get());
    bf16* next = scratch_.get() + (64 - start % 64) % 64 / sizeof(bf16);
    for (size_t buffer = 1; buffer < widths_.size(); buffer++) {
        buffers_[buffer] = next;
        next += room_ * widths_[buffer];
    }
}

}  // namespace tgi
