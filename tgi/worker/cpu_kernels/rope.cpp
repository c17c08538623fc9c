// See rope.h. Computed in float32 and rounded once.
#include "rope.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace tgi {
namespace {

// Sixteen pairs at a time, the last ones together.
void rotate_halves(Element* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = std::min(half - i, LANES);
        const Float first = load_first(head + i, count), second = load_first(head + half + i, count);
        const Float a = second * load_first(sin + i, count), b = first * load_first(sin + half + i, count);
        store_first(head + i, fms(first, load_first(cos + i, count), a), count);
        store_first(head + half + i, fma(second, load_first(cos + half + i, count), b), count);
    }
}

void rotate_neighbours(Element* head, const float* cos, const float* sin, int64_t rotary_dim) {
    for (int64_t i = 0; i < rotary_dim; i += 2) {
        const float first = to_float(head[i]), second = to_float(head[i + 1]);
        head[i] = round_to<Element>(std::fma(first, cos[i], -(second * sin[i])));
        head[i + 1] = round_to<Element>(std::fma(second, cos[i + 1], first * sin[i + 1]));
    }
}

struct RopeJob final : Job {
    explicit RopeJob(const RopeCall& call) : call(call) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, call.tokens);
        for (int64_t token = chunk * CHUNK; token < last; token++) {
            const float *cos = call.angles + call.positions[token] * 2 * call.rotary_dim, *sin = cos + call.rotary_dim;
            for (int64_t n = 0; n < call.heads; n++) {
                Element* head = call.x + token * call.stride + n * call.head_dim;
                if (call.neighbours) rotate_neighbours(head, cos, sin, call.rotary_dim);
                else rotate_halves(head, cos, sin, call.rotary_dim / 2);
            }
        }
    }

    static constexpr int64_t CHUNK = 8;  // tokens of a chunk
    const RopeCall& call;
};

}  // namespace

void rope(ThreadPool& pool, const RopeCall& call) { pool.run(RopeJob(call),
    (call.tokens + RopeJob::CHUNK - 1) / RopeJob::CHUNK); }

}  // namespace tgi
