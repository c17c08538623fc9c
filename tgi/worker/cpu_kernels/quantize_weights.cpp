// Quantizes bfloat16 weights to 8 or 4 bits, bit for bit as quantization/quantize.py.
#include "quantize_weights.h"

#include <immintrin.h>

#include <algorithm>

#include "vector_math.h"

namespace tgi {
namespace {

constexpr int MAX_INT8 = 127, GRID_STEPS = 4, FACTORS = 8, GROUP = 32;

// The largest magnitude, NaN if an element is NaN: bit patterns without the sign have the order of the magnitudes.
float largest(const bf16* weight, int64_t inputs) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t at = 0; at < inputs; at += GROUP) {
        const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(weight + at), _mm512_set1_epi16(0x7fff));
        most = _mm512_max_epu16(most, bits);
    }
    alignas(64) uint16_t each[GROUP];
    _mm512_store_si512(each, most);
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(*std::max_element(each, each + GROUP) << 16)));
}

// Sixteen weights in units of their output's scale, from -MAX_INT8 to MAX_INT8; 0 for NaN.
__m512 units(const bf16* weight, __m512 reciprocal) {
    const __m512 found = _mm512_mul_ps(load(weight).part[0], reciprocal);
    const __mmask16 numbers = _mm512_cmp_ps_mask(found, found, _CMP_ORD_Q);
    return _mm512_maskz_max_ps(numbers, _mm512_set1_ps(-MAX_INT8), _mm512_min_ps(_mm512_set1_ps(MAX_INT8), found));
}

struct QuantizeJob final : Job {
    explicit QuantizeJob(const QuantizeCall& call) : call(call), height(std::max<int64_t>(1,
        CHUNK_WEIGHTS / call.inputs)) {}

    int64_t chunks() const { return (call.outputs + height - 1) / height; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * height, call.outputs);
        for (int64_t output = chunk * height; output < last; output++) {
            const bf16* weight = call.weight + output * call.inputs;
            const uint16_t half = _cvtss_sh(largest(weight, call.inputs) / MAX_INT8, _MM_FROUND_TO_NEAREST_INT);
            call.scales[output] = half;
            const float scale = _cvtsh_ss(half);
            const __m512 reciprocal = _mm512_set1_ps(scale == 0 ? 0 : 1 / scale);
            for (int64_t at = 0; at < call.inputs; at += GROUP) {
                const __m512 first = units(weight + at, reciprocal), second = units(weight + at + 16, reciprocal);
                const int64_t to = output * call.inputs + at;
                if (call.factors) {
                    call.factors[to / GROUP] = four(first, second, call.codes + to / 2);
                } else {
                    eight(first, call.codes + to);
                    eight(second, call.codes + to + 16);
                }
            }
        }
    }

    static void eight(__m512 numbers, uint8_t* codes) {
        _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(numbers)));
    }

    // Writes the codes of a group, and returns its factor.
    uint8_t four(__m512 first, __m512 second, uint8_t* codes) const {
        alignas(64) int32_t points[GROUP];
        const __m512i at[] = {grid_point_row(first), grid_point_row(second)};
        _mm512_store_si512(points, at[0]);
        _mm512_store_si512(points + 16, at[1]);
        // All errors are multiples of 1/16, so sums are exact and their order does not matter.
        __m256 sums[4] = {};
        for (int n = 0; n < GROUP; n++) sums[n % 4] = _mm256_add_ps(sums[n % 4],
            _mm256_loadu_ps(call.grid_errors + points[n]));
        alignas(32) float errors[FACTORS];
        _mm256_store_ps(errors, _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
        const int factor = std::min_element(errors, errors + FACTORS) - errors;
        for (int n = 0; n < 2; n++) {
            const __m512i from = _mm512_add_epi32(at[n], _mm512_set1_epi32(factor));
            const __m512i found = _mm512_and_si512(_mm512_i32gather_epi32(from, call.grid_codes, 1),
                _mm512_set1_epi32(15));
            const __m512i pairs = _mm512_or_si512(found, _mm512_srli_epi64(found, 28));
            _mm_storel_epi64((__m128i*)(codes + 8 * n), _mm512_cvtepi64_epi8(pairs));
        }
        return factor;
    }

    // The indices of the rows of the tables for these numbers.
    static __m512i grid_point_row(__m512 numbers) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(numbers, _mm512_set1_ps(GRID_STEPS)));
        return _mm512_slli_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(MAX_INT8 * GRID_STEPS)), 3);
    }

    static constexpr int64_t CHUNK_WEIGHTS = 1 << 15;  // weights of a chunk
    const QuantizeCall& call;
    const int64_t height;
};

}  // namespace

void quantize(ThreadPool& pool, const QuantizeCall& call) {
    const QuantizeJob job(call);
    pool.run(job, job.chunks());
}

}  // namespace tgi
