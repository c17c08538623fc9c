// See byte_planes.h.
#include "elements.h"

#if TGI_DOT_ENGINE

#include "byte_planes.h"

#include <cstring>
#include <deque>
#include <limits>
#include <vector>

namespace tgi {
namespace {

constexpr float MAX_UNITS = 32767;  // units of a row's largest magnitude
constexpr int32_t OFFSET = 1 << 15;  // makes the integers unsigned
constexpr float SMALLEST = 0x1p-100f;  // rows of smaller magnitudes become zeros

struct SplitJob final : Job {
    SplitJob(const LinearCall& call, const OperandRows& x, uint8_t* upper, uint8_t* lower, int64_t step, float* units)
        : call(call), x(x), inputs(x.step), upper(upper), lower(lower), step(step), units(units) {}

    int64_t chunks() const { return call.rows <= ROWS_OF_ONE_THREAD ? 1 : (call.rows + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = chunks() == 1 ? call.rows : std::min((chunk + 1) * CHUNK, call.rows);
        for (int64_t row = chunk * CHUNK; row < last; row++) {
            const bf16* x = this->x.at + row * inputs;
            const float most = largest(x);
            const bool none = most < SMALLEST, odd = !(most <= std::numeric_limits<float>::max());
            write(x, none || odd ? 0 : MAX_UNITS / most, upper + row * step, lower + row * step);
            units[row] = odd ? std::numeric_limits<float>::quiet_NaN() : none ? 0 : most / MAX_UNITS;
        }
    }

  private:
    // The largest magnitude; infinity or NaN if an element is.
    float largest(const bf16* x) const {
        const Int magnitude = broadcast(int32_t(0x7fffffff));
        Int most{};  // as bit patterns, which have the order of the magnitudes
        for (int64_t k = 0; k < inputs; k += 32) {
            const Int even = as_int(load_input<0>(x + k, 0)), odd = as_int(load_input<1>(x + k, 0));
            most = max(most, max(even & magnitude, odd & magnitude));
        }
        const int32_t bits = reduce_max(most);
        float found;
        memcpy(&found, &bits, sizeof found);
        return found;
    }

    void write(const bf16* x, float per_number, uint8_t* high, uint8_t* low) const {
        const Float factor = broadcast(per_number);
        const Int offset = broadcast(OFFSET);
        for (int64_t k = 0; k < inputs; k += 32) {
            const Int even = to_nearest_int(load_input<0>(x + k, 0) * factor) + offset;
            const Int odd = to_nearest_int(load_input<1>(x + k, 0) * factor) + offset;
            const Int numbers = even | shift_left(odd, 16);
            store_even_bytes(high + k, shift_right(numbers, 8));
            store_even_bytes(low + k, numbers);
        }
    }

    // Rows that one thread converts alone; rows of a chunk
    static constexpr int64_t ROWS_OF_ONE_THREAD = 8, CHUNK = 16;
    const LinearCall call;
    const OperandRows x;
    const int64_t inputs;
    uint8_t *const upper, *const lower;
    const int64_t step;  // bytes
    float* const units;
};

struct SplitGroupsJob final : Job {
    void run(int64_t chunk, int64_t thread) const override {
        for (int64_t part = 0; part < jobs[chunk].chunks(); part++) jobs[chunk].run(part, thread);
    }

    std::deque<SplitJob> jobs;
};

struct alignas(CACHE_LINE) Line {
    uint8_t bytes[CACHE_LINE];
};

// Memory for the byte planes and units of all rows of a call.
struct PlaneMemory {
    explicit PlaneMemory(const LinearCall& call) : step(call.weight.form.padded_inputs(call.weight.inputs)) {
        static thread_local std::vector<Line> lines;
        static thread_local std::vector<float> all_units;
        const int64_t bytes = call.rows * step;
        if ((int64_t)lines.size() * CACHE_LINE < 2 * bytes) lines.resize(2 * bytes / CACHE_LINE);
        if ((int64_t)all_units.size() < call.rows) all_units.resize(call.rows);
        at = lines[0].bytes, units = all_units.data();
    }

    // Both planes of some rows, next to each other.
    BytePlanes planes(int64_t first, int64_t rows) const {
        return {(const bf16*)upper(first), units + first, step / 2, rows * step / 2};
    }

    uint8_t* upper(int64_t first) const { return at + 2 * first * step; }

    const int64_t step;  // bytes
    uint8_t* at;
    float* units;
};

}  // namespace

BytePlanes split_activations(ThreadPool& pool, const LinearCall& call, const OperandRows& x) {
    const PlaneMemory memory(call);
    const SplitJob job(call, x, memory.at, memory.at + call.rows * memory.step, memory.step, memory.units);
    pool.run(job, job.chunks());
    return memory.planes(0, call.rows);
}

std::vector<BytePlanes> split_groups(ThreadPool& pool, const LinearCall& call, const OperandRows& x,
    const std::vector<WeightRows>& groups) {
    const PlaneMemory memory(call);
    SplitGroupsJob all;
    std::vector<BytePlanes> planes;
    for (const auto& [weight, bias, first, rows] : groups) {
        uint8_t* const upper = memory.upper(first);
        all.jobs.emplace_back(group_call(call, {weight, bias, first, rows}), x.from(first), upper,
            upper + rows * memory.step, memory.step, memory.units + first);
        planes.push_back(memory.planes(first, rows));
    }
    pool.run(all, all.jobs.size());
    return planes;
}

}  // namespace tgi

#endif
