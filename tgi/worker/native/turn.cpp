// See turn.h. Computed in float32 and rounded once.
#include "turn.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vectors.h"

namespace tgi {
namespace {

inline float wide(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

inline bf16 narrow(float x) { return (bf16)(uint16_t)_mm_cvtsi128_si32((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x))); }

// Sixteen pairs, as long as there are so many; the rest one by one.
void turn_halves(bf16* head, const float* cos, const float* sin, int64_t half) {
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

void turn_neighbours(bf16* head, const float* cos, const float* sin, int64_t turned) {
    for (int64_t i = 0; i < turned; i += 2) {
        const float first = wide(head[i]), second = wide(head[i + 1]);
        head[i] = narrow(std::fma(first, cos[i], -(second * sin[i])));
        head[i + 1] = narrow(std::fma(second, cos[i + 1], first * sin[i + 1]));
    }
}

struct TurnJob final : Job {
    explicit TurnJob(const TurnCall& call) : call(call) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * SHARE, call.tokens);
        for (int64_t token = chunk * SHARE; token < last; token++) {
            const float *cos = call.angles + call.positions[token] * 2 * call.turned, *sin = cos + call.turned;
            for (int64_t n = 0; n < call.heads; n++) {
                bf16* head = call.x + token * call.stride + n * call.head_dim;
                if (call.neighbours) turn_neighbours(head, cos, sin, call.turned);
                else turn_halves(head, cos, sin, call.turned / 2);
            }
        }
    }

    static constexpr int64_t SHARE = 8;  // tokens of a chunk
    const TurnCall& call;
};

}  // namespace

void turn(Team& team, const TurnCall& call) { team.run(TurnJob(call), (call.tokens + TurnJob::SHARE - 1) / TurnJob::SHARE); }

}  // namespace tgi
