// See rope.h. Computed in float32 and rounded once.
#include "rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vector_math.h"

namespace tgi {
namespace {

inline float wide(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

inline bf16 narrow(float x) { return (bf16)(uint16_t)_mm_cvtsi128_si32((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x))); }

// Sixteen pairs at a time, then the remaining ones one by one.
void rotate_halves(bf16* head, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const __m512 first = load(head + i), second = load(head + half + i);
        const __m512 a = _mm512_mul_ps(second, _mm512_loadu_ps(sin + i));
        const __m512 b = _mm512_mul_ps(first, _mm512_loadu_ps(sin + half + i));
        store(head + i, _mm512_fmsub_ps(first, _mm512_loadu_ps(cos + i), a));
        store(head + half + i, _mm512_fmadd_ps(second, _mm512_loadu_ps(cos + half + i), b));
    }
    for (; i < half; i++) {
        const float first = wide(head[i]), second = wide(head[half + i]);
        head[i] = narrow(std::fma(first, cos[i], -(second * sin[i])));
        head[half + i] = narrow(std::fma(second, cos[half + i], first * sin[half + i]));
    }
}

void rotate_neighbours(bf16* head, const float* cos, const float* sin, int64_t rotary_dim) {
    for (int64_t i = 0; i < rotary_dim; i += 2) {
        const float first = wide(head[i]), second = wide(head[i + 1]);
        head[i] = narrow(std::fma(first, cos[i], -(second * sin[i])));
        head[i + 1] = narrow(std::fma(second, cos[i + 1], first * sin[i + 1]));
    }
}

struct RopeJob final : Job {
    explicit RopeJob(const RopeCall& call) : call(call) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, call.tokens);
        for (int64_t token = chunk * CHUNK; token < last; token++) {
            const float *cos = call.angles + call.positions[token] * 2 * call.rotary_dim, *sin = cos + call.rotary_dim;
            for (int64_t n = 0; n < call.heads; n++) {
                bf16* head = call.x + token * call.stride + n * call.head_dim;
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
