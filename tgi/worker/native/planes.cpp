// See planes.h.
#include "planes.h"

#include <cstring>
#include <limits>
#include <vector>

namespace tgi {
namespace {

constexpr float MOST = 32767;       // units of a row's largest number
constexpr int HALF = 1 << 15;       // what is added
constexpr float LEAST = 0x1p-100f;  // rows of smaller numbers count as zeros

struct PlanesJob final : Job {
    PlanesJob(const LinearCall& call, uint8_t* upper, uint8_t* lower, int64_t step, float* units)
        : call(call), inputs(call.weight.inputs), upper(upper), lower(lower), step(step), units(units) {}

    int64_t chunks() const { return call.rows <= FEW ? 1 : (call.rows + SHARE - 1) / SHARE; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = chunks() == 1 ? call.rows : std::min((chunk + 1) * SHARE, call.rows);
        for (int64_t row = chunk * SHARE; row < last; row++) {
            const bf16* x = call.x + row * inputs;
            const float most = largest(x);
            const bool none = most < LEAST, odd = !(most <= std::numeric_limits<float>::max());
            write(x, none || odd ? 0 : MOST / most, upper + row * step, lower + row * step);
            units[row] = odd ? std::numeric_limits<float>::quiet_NaN() : none ? 0 : most / MOST;
        }
    }

  private:
    // The largest magnitude; infinite or no number if one of them is.
    float largest(const bf16* x) const {
        const __m512i magnitude = _mm512_set1_epi16(0x7fff);
        __m512i most = _mm512_setzero_si512();  // as bits, which are ordered like magnitudes
        for (int64_t k = 0; k < inputs; k += 32)
            most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + k), magnitude));
        const __m512i even = _mm512_slli_epi32(most, 16), odd = _mm512_and_si512(most, _mm512_set1_epi32(0xffff0000));
        const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(even, odd));
        float found;
        memcpy(&found, &bits, sizeof found);
        return found;
    }

    void write(const bf16* x, float per_number, uint8_t* high, uint8_t* low) const {
        const __m512 factor = _mm512_set1_ps(per_number);
        const auto number = [&](__m512i bits) {
            const __m512i nearest = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), factor));
            return _mm512_add_epi32(nearest, _mm512_set1_epi32(HALF));
        };
        for (int64_t k = 0; k < inputs; k += 32) {
            const __m512i both = _mm512_loadu_si512(x + k);
            const __m512i even = number(_mm512_slli_epi32(both, 16));
            const __m512i odd = number(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
            const __m512i numbers = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
            _mm256_storeu_si256((__m256i*)(high + k), _mm512_cvtepi16_epi8(_mm512_srli_epi16(numbers, 8)));
            _mm256_storeu_si256((__m256i*)(low + k), _mm512_cvtepi16_epi8(numbers));
        }
    }

    static constexpr int64_t FEW = 8, SHARE = 16;  // rows that one thread goes through alone, and those of a chunk
    const LinearCall& call;
    const int64_t inputs;
    uint8_t *const upper, *const lower;
    const int64_t step;  // bytes
    float* const units;
};

struct alignas(LINE) Line {
    uint8_t bytes[LINE];
};

}  // namespace

Planes planes(Team& team, const LinearCall& call) {
    static thread_local std::vector<Line> lines;
    static thread_local std::vector<float> units;
    const int64_t step = call.weight.form.filled(call.weight.inputs), bytes = call.rows * step;
    if ((int64_t)lines.size() * LINE < 2 * bytes) lines.resize(2 * bytes / LINE);
    if ((int64_t)units.size() < call.rows) units.resize(call.rows);
    uint8_t* const at = lines[0].bytes;
    const PlanesJob job(call, at, at + bytes, step, units.data());
    team.run(job, job.chunks());
    return {(const bf16*)at, units.data(), step / 2, bytes / 2};
}

}  // namespace tgi
