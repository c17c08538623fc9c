// See gather_rows.h. A row is spread over its panel in pairs of inputs, so the whole panel is decoded as for a product,
// and the pairs are picked from it.
#include "gather_rows.h"

#include <algorithm>
#include <cstring>

#include "dequantize.h"

namespace tgi {
namespace {

constexpr int64_t CHUNK = 8;  // rows of a chunk

struct GatherRowsJob final : Job {
    explicit GatherRowsJob(const GatherRowsCall& call) : call(call), w(call.weight) {}

    int64_t chunks() const { return (call.count + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, call.count);
        for (int64_t n = chunk * CHUNK; n < last; n++) one(call.ids[n], call.y + n * w.inputs);
    }

    void one(int64_t id, bf16* y) const {
        const uint8_t *at = w.panel(id / PANEL), *end = w.panel(id / PANEL + 1);
        if (w.form.integer) return integer_row(id % PANEL, at, y);
        if (w.form.bits == 16) return decoded_row(id % PANEL, amx_columns((const bf16*)at, at + PREFETCH_DISTANCE,
            end), y);
        with_group_format(w.form, [&](auto bits, auto shifts) { decoded_row(id % PANEL, GroupDecoder<bits, shifts>(w,
            at), y); });
    }

    // Output `n` of a panel of integers.
    void integer_row(int64_t n, const uint8_t* panel, bf16* y) const {
        const __m512 scale = _mm512_set1_ps(((const float*)panel)[n]);
        const auto* at = (const bf16*)(panel + w.form.header_bytes(w.inputs));
        NibbleDecoder nibbles(w, panel, 0);
        for (int64_t k = 0; k < w.inputs; k += 64, at += 64 * PANEL / 2) {
            const bf16* quad = (w.form.bits == 4 ? nibbles.next_block() : at) + n / 16 * 512 + n % 16 * 2;
            alignas(64) int8_t numbers[64];
            for (int64_t j = 0; j < 16; j++, quad += 32) memcpy(numbers + 4 * j, quad, 4);
            for (int64_t i = 0; i < std::min<int64_t>(64, w.inputs - k); i += 16, y += 16)
                store(y, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((__m128i*)(numbers +
                    i)))), scale));
        }
    }

    // Output `n` of the panel that `source` decodes.
    template <class Source>
    void decoded_row(int64_t n, Source source, bf16* y) const {
        for (int64_t k = 0; k < w.inputs; k += 32) {
            const bf16* pair = source.next_block() + n / 16 * source.right + n % 16 * 2;
            for (int64_t j = 0; j < 16; j++, pair += source.step, y += 2) memcpy(y, pair, 2 * sizeof(bf16));
        }
    }

    const GatherRowsCall call;
    const PackedWeight& w;
};

}  // namespace

void gather_rows(ThreadPool& pool, const GatherRowsCall& call) {
    const GatherRowsJob job(call);
    pool.run(job, job.chunks());
}

}  // namespace tgi
