// See fma_peak.h.
#include "fma_peak.h"

#include <atomic>

#include "simd.h"

namespace tgi {
namespace {

// `Instructions` runs so many OPERATIONS at once. A chunk has ROUNDS of them, some 20 microseconds.

#if TGI_DOT_ENGINE && defined(__AMX_BF16__) && defined(__AMX_INT8__)

// Products of 32 rows and 32 columns over 32 inputs, as dot_tile.h computes them: four sums, two tiles of rows, two
// of columns, each 16 rows of 64 bytes.
struct Instructions {
    static constexpr int64_t OPERATIONS = 2 * 32 * 32 * 32, ROUNDS = 1000;

    Instructions() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("ldtilecfg %0" : : "m"(config));
    }

    void run() {
        asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0");
        asm volatile("tdpbf16ps %tmm7, %tmm4, %tmm1");
        asm volatile("tdpbf16ps %tmm6, %tmm5, %tmm2");
        asm volatile("tdpbf16ps %tmm7, %tmm5, %tmm3");
    }

    float result() const { return 0; }
};

#else

// Independent sums: at least the latency of the instruction times those that start in a cycle; together with two
// multiplicands they fit the registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int SUMS = 12;
#else
constexpr int SUMS = 20;
#endif

struct Instructions {
    static constexpr int64_t OPERATIONS = 2 * REGISTER_LANES * SUMS * (TGI_DOT_ENGINE ? 2 : 1), ROUNDS = 10000;

    Instructions() {
        for (int i = 0; i < SUMS; i++) sums[i] = FloatRegister{} + float(i);  // not the same, or they would be one sum
    }

    void run() {
#pragma GCC unroll 20
        for (int i = 0; i < SUMS; i++) {
#if TGI_DOT_ENGINE && defined(__x86_64__)
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)a, (__m512bh)b);
#elif TGI_DOT_ENGINE
            sums[i] = vbfdotq_f32(sums[i], vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
#else
            sums[i] = fma(sums[i], a, b);
#endif
        }
    }

    float result() const {
        FloatRegister total{};
        for (const FloatRegister& sum : sums) total += sum;
        return total[0];
    }

    FloatRegister sums[SUMS], a = FloatRegister{} + 0.5f, b = FloatRegister{} + 0.25f;
};

#endif

struct PeakJob final : Job {
    void run(int64_t, int64_t) const override {
        Instructions instructions;
        for (int64_t i = 0; i < Instructions::ROUNDS; i++) instructions.run();
        if (instructions.result() < 0) used = true;  // never: it keeps the compiler from leaving the sums out
    }

    mutable std::atomic<bool> used{false};
};

}  // namespace

int64_t fma_peak(ThreadPool& pool, int64_t chunks) {
    const PeakJob job;
    pool.run(job, chunks);
    return chunks * Instructions::ROUNDS * Instructions::OPERATIONS;
}

}  // namespace tgi
