// What products with packed weights share on both engines: rows as operands, the division among threads, and pairs of a
// gate and an up projection.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "engine.h"
#include "linear.h"
#include "work_stealing.h"

namespace tgi {

constexpr int64_t MAX_CHUNK_ROWS = 512;  // rows of a chunk, each of which reads the weights from memory once,
constexpr int64_t MIN_CHUNK_ROWS = TGI_DOT_ENGINE ? 256 : 96;  // or fewer, if x then stays in half of the L2 cache

// Bytes of the next weight that a waiting thread prefetches: an eighth of an L2 cache of 2 MB.
constexpr int64_t EARLY_BYTES = 1 << 18;

// The number of rows of `inputs` inputs that fit half of a core's L2 cache.
inline int64_t rows_in_l2(int64_t inputs) {
    int64_t size = 1 << 20;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    static const int64_t found = sysconf(_SC_LEVEL2_CACHE_SIZE);
    size = std::max(found, size / 2);
#endif
    return size / 2 / (int64_t)sizeof(Operand) / inputs;
}

// Rows of a chunk, a multiple of `tile`, so that there are as few groups of rows as possible.
inline int64_t chunk_rows(const LinearCall& call, int64_t tile) {
    const int64_t most = std::clamp(rows_in_l2(call.weight.inputs), MIN_CHUNK_ROWS, MAX_CHUNK_ROWS);
    const int64_t tiles = (call.rows + tile - 1) / tile, least = (call.rows + most - 1) / most;
    return (tiles + least - 1) / least * tile;
}

// The call for the up projection of a pair: its sums are multiplied with the gate's result, which is rounded first.
// Bias and LoRA sums have the gate's outputs first, then the up projection's.
inline LinearCall up_projection_call(LinearCall call) {
    if (call.bias) call.bias += call.weight.outputs;
    if (call.plus) call.plus += call.weight.outputs;
    call.other = call.y;
    call.epilogue = call.epilogue == Epilogue::clamped_silu ? Epilogue::clamped_mul : Epilogue::mul;
    return call;
}

// The part of a call that multiplies the rows of a group.
inline LinearCall group_call(LinearCall call, const WeightRows& group) {
    const int64_t skipped = group.first * call.weight.outputs;
    call.weight.at = group.weight, call.bias = group.bias, call.rows = group.rows;
    call.x += group.first * call.weight.inputs;
    if (call.plus) call.plus += group.first * call.plus_step;
    if (call.other) call.other += skipped;
    if (call.y) call.y += skipped;
    if (call.wide) call.wide += skipped;
    return call;
}

// The rows of x as operands, padded with zeros to a multiple of 32 inputs.
struct OperandRows {
    OperandRows from(int64_t row) const { return {at + row * step, step}; }

    const Operand* at;
    int64_t step;
};

struct ConvertJob final : Job {
    ConvertJob(const LinearCall& call, Operand* to, int64_t step) : call(call), inputs(call.weight.inputs), to(to),
        step(step) {}

    int64_t chunks() const { return call.rows <= CHUNK ? 1 : (call.rows + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, call.rows);
        for (int64_t row = chunk * CHUNK; row < last; row++)
            for (int64_t k = 0; k < step; k += LANES)
                store(to + row * step + k, load_first(call.x + row * inputs + k, std::clamp<int64_t>(inputs - k, 0,
                    LANES)));
    }

    static constexpr int64_t CHUNK = 16;  // rows of a chunk
    const LinearCall& call;
    const int64_t inputs;
    Operand* const to;
    const int64_t step;
};

// The rows of a call, valid until the next call.
inline OperandRows operand_rows(ThreadPool& pool, const LinearCall& call) {
    const int64_t inputs = call.weight.inputs, step = (inputs + 31) / 32 * 32;
    if constexpr (std::is_same_v<Element, Operand>)
        if (inputs == step) return {reinterpret_cast<const Operand*>(call.x), inputs};
    static thread_local std::vector<Operand> converted;
    if ((int64_t)converted.size() < call.rows * step) converted.resize(call.rows * step);
    const ConvertJob job(call, converted.data(), step);
    pool.run(job, job.chunks());
    return {converted.data(), step};
}

// A product, divided into rows times panels. The engines define what is done with each of them.
struct LinearJob : Job {
    LinearJob(const LinearCall& called, int64_t chunk_height, int64_t threads)
        : call(called), w(call.weight), up_call(up_projection_call(call)),
          queue(call.rows, chunk_height, w.output_blocks(), threads) {}

    void run(int64_t, int64_t thread) const override {
        for (WorkStealingQueue::Chunk chunk; queue.claim(thread, chunk);)
            compute(chunk.row, chunk.rows, chunk.first * w.form.weights, chunk.last * w.form.weights);
    }

    // The sums of some rows times the panels from `first` to `last` - 1.
    virtual void compute(int64_t row, int64_t rows, int64_t first, int64_t last) const = 0;

    // The start of this thread's range of the next weight, which it can prefetch while other threads finish this
    // product.
    PrefetchRange prefetch_after(int64_t thread) const override {
        if (!call.next) return {};
        const auto panel = [&, weight = *call.next](int64_t thread) {
            return weight.panel(WorkStealingQueue::begin(weight.output_blocks(), thread,
                queue.threads()) * weight.form.weights);
        };
        return {panel(thread), std::min(panel(thread + 1), panel(thread) + EARLY_BYTES)};
    }

    // The call whose epilogue a panel has, and the first output of the panel.
    const LinearCall& call_of(int64_t number) const { return number % w.form.weights ? up_call : call; }
    int64_t first_output(int64_t number) const { return number / w.form.weights * PANEL; }

    const LinearCall call;
    const PackedWeight& w;
    const LinearCall up_call;
    mutable WorkStealingQueue queue;
};

// The products of all groups of a call, one after the other on each thread.
template <class GroupJob>
struct GroupedLinearJob final : Job {
    void run(int64_t, int64_t thread) const override {
        for (const GroupJob& job : jobs) job.run(0, thread);
    }

    std::deque<GroupJob> jobs;  // which cannot be moved
};

}  // namespace tgi
