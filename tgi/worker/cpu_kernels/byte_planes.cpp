// See byte_planes.h.
#include "elements.h"

#if TGI_DOT_ENGINE

#include "byte_planes.h"

#include <cstring>
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
    const LinearCall& call;
    const OperandRows x;
    const int64_t inputs;
    uint8_t *const upper, *const lower;
    const int64_t step;  // bytes
    float* const units;
};

struct alignas(CACHE_LINE) Line {
    uint8_t bytes[CACHE_LINE];
};

}  // namespace

BytePlanes split_activations(ThreadPool& pool, const LinearCall& call, const OperandRows& x) {
    static thread_local std::vector<Line> lines;
    static thread_local std::vector<float> units;
    const int64_t step = call.weight.form.padded_inputs(call.weight.inputs), bytes = call.rows * step;
    if ((int64_t)lines.size() * CACHE_LINE < 2 * bytes) lines.resize(2 * bytes / CACHE_LINE);
    if ((int64_t)units.size() < call.rows) units.resize(call.rows);
    uint8_t* const at = lines[0].bytes;
    const SplitJob job(call, x, at, at + bytes, step, units.data());
    pool.run(job, job.chunks());
    return {(const bf16*)at, units.data(), step / 2, bytes / 2};
}

}  // namespace tgi

#endif
