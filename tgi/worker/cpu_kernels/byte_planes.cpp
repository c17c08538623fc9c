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
constexpr int OFFSET = 1 << 15;  // makes the integers unsigned
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
        const __m512i magnitude = _mm512_set1_epi16(0x7fff);
        __m512i most = _mm512_setzero_si512();  // as bit patterns, which have the order of the magnitudes
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
            return _mm512_add_epi32(nearest, _mm512_set1_epi32(OFFSET));
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
