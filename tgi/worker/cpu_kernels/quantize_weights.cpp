// Quantizes weights to 8 or 4 bits, bit for bit as quantization/quantize.py.
#include "quantize_weights.h"

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace tgi {
namespace {

constexpr int MAX_INT8 = 127, GRID_STEPS = 4, FACTORS = 8, GROUP = 32;

typedef float FactorErrors __attribute__((vector_size(4 * FACTORS)));

// The largest magnitude, NaN if an element is NaN: bit patterns without the sign have the order of the magnitudes.
template <class T>
float largest(const T* weight, int64_t inputs) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    Bits most = 0;
    for (int64_t at = 0; at < inputs; at++) {
        Bits bits;
        memcpy(&bits, weight + at, sizeof bits);
        most = std::max<Bits>(most, bits & Bits(-1) >> 1);
    }
    T found;
    memcpy(&found, &most, sizeof found);
    return to_float(found);
}

// Sixteen weights in units of their output's scale, from -MAX_INT8 to MAX_INT8; 0 for NaN.
template <class T>
Float units(const T* weight, Float reciprocal) {
    const Float found = load(weight) * reciprocal;
    return select(found == found, max(broadcast(-float(MAX_INT8)), min(broadcast(float(MAX_INT8)), found)), zeros());
}

template <class T>
struct QuantizeJob final : Job {
    explicit QuantizeJob(const QuantizeCall& call) : call(call), height(std::max<int64_t>(1,
        CHUNK_WEIGHTS / call.inputs)) {}

    int64_t chunks() const { return (call.outputs + height - 1) / height; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * height, call.outputs);
        for (int64_t output = chunk * height; output < last; output++) {
            const T* weight = (const T*)call.weight + output * call.inputs;
            const f16 half = round_to<f16>(largest(weight, call.inputs) / MAX_INT8);
            call.scales[output] = half;
            const float scale = to_float(half);
            const Float reciprocal = broadcast(scale == 0 ? 0 : 1 / scale);
            for (int64_t at = 0; at < call.inputs; at += GROUP) {
                const Float first = units(weight + at, reciprocal), second = units(weight + at + 16, reciprocal);
                const int64_t to = output * call.inputs + at;
                if (call.factors) {
                    call.factors[to / GROUP] = four(first, second, call.codes + to / 2);
                } else {
                    store((int8_t*)call.codes + to, to_int(round_to_even(first)));
                    store((int8_t*)call.codes + to + 16, to_int(round_to_even(second)));
                }
            }
        }
    }

    // Writes the codes of a group, and returns its factor.
    uint8_t four(Float first, Float second, uint8_t* codes) const {
        alignas(64) int32_t points[GROUP];
        store(points, grid_point_row(first));
        store(points + 16, grid_point_row(second));
        // All errors are multiples of 1/16, so sums are exact and their order does not matter.
        FactorErrors sums[4] = {};
        for (int n = 0; n < GROUP; n++) {
            FactorErrors errors;
            memcpy(&errors, call.grid_errors + points[n], sizeof errors);
            sums[n % 4] += errors;
        }
        alignas(32) float errors[FACTORS];
        const FactorErrors sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        memcpy(errors, &sum, sizeof errors);
        const int factor = std::min_element(errors, errors + FACTORS) - errors;
        const uint8_t* table = call.grid_codes + factor;
        for (int n = 0; n < GROUP; n += 2) codes[n / 2] = table[points[n]] | table[points[n + 1]] << 4;
        return factor;
    }

    // The indices of the rows of the tables for these numbers.
    static Int grid_point_row(Float numbers) {
        const Int rounded = to_int(round_to_even(numbers * broadcast(float(GRID_STEPS))));
        return shift_left(rounded + broadcast(MAX_INT8 * GRID_STEPS), 3);
    }

    static constexpr int64_t CHUNK_WEIGHTS = 1 << 15;  // weights of a chunk
    const QuantizeCall& call;
    const int64_t height;
};

}  // namespace

void quantize(ThreadPool& pool, const QuantizeCall& call) {
    const auto run = [&](auto number) {
        const QuantizeJob<decltype(number)> job(call);
        pool.run(job, job.chunks());
    };
    if (call.form.bits == 32) run(float());
    else call.form.half ? run(f16()) : run(bf16());
}

}  // namespace tgi
