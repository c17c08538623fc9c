// Norms of rows, in float32. See norm.h.
#include "norm.h"

#include <cmath>

#include "vector_math.h"

namespace tgi {
namespace {

constexpr int64_t CHUNK = 8;  // rows of a chunk

inline __m512 load_masked(const bf16* at, __mmask16 there) {
    const __m256i half = _mm256_maskz_loadu_epi16(there, at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

struct NormJob final : Job {
    explicit NormJob(const NormCall& call) : call(call) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = (chunk + 1) * CHUNK < call.rows ? (chunk + 1) * CHUNK : call.rows;
        for (int64_t row = chunk * CHUNK; row < last; row++)
            for (int64_t part = 0; part < call.parts; part++) one(row * call.step + part * call.size, part * call.size);
    }

    // The part from element `from` on; `scales` is the index of its first weight.
    void one(int64_t from, int64_t scales) const {
        const bf16* x = call.x + from;
        bf16* y = call.y + from;
        const float mean = call.centred ? total(x, 0.f, false) / call.size : 0.f;
        const __m512 middle = _mm512_set1_ps(mean);
        const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(total(x, mean, true) / call.size + call.epsilon));
        for (int64_t at = 0; at < call.size; at += 16) {
            const __mmask16 there = at + 16 <= call.size ? 0xffff : (1u << (call.size - at)) - 1;
            __m512 z = _mm512_mul_ps(_mm512_sub_ps(load_masked(x + at, there), middle), scale);
            z = _mm512_mul_ps(z, _mm512_maskz_loadu_ps(there, call.weight + scales + at));
            if (call.bias) z = _mm512_add_ps(z, _mm512_maskz_loadu_ps(there, call.bias + scales + at));
            _mm256_mask_storeu_epi16(y + at, there, (__m256i)_mm512_cvtneps_pbh(z));
        }
    }

    // The sum of x - mean, or of its squares.
    float total(const bf16* x, float mean, bool squares) const {
        const __m512 middle = _mm512_set1_ps(mean);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t at = 0; at < call.size; at += 16) {
            const __mmask16 there = at + 16 <= call.size ? 0xffff : (1u << (call.size - at)) - 1;
            const __m512 z = _mm512_maskz_sub_ps(there, load_masked(x + at, there), middle);
            sum = squares ? _mm512_fmadd_ps(z, z, sum) : _mm512_add_ps(sum, z);
        }
        return _mm512_reduce_add_ps(sum);
    }

    const NormCall call;
};

}  // namespace

void norm(ThreadPool& pool, const NormCall& call) { pool.run(NormJob(call), (call.rows + CHUNK - 1) / CHUNK); }

}  // namespace tgi
