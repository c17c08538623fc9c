// See rows.h. A row lies in pieces of two inputs all over its panel, so the whole panel is gone through and turned into
// numbers, as for a product, and the pieces are picked from those.
#include "rows.h"

#include <algorithm>
#include <cstring>

#include "codes.h"
#include "nibbles.h"

namespace tgi {
namespace {

constexpr int64_t SHARE = 8;  // rows of a chunk

struct RowsJob final : Job {
    explicit RowsJob(const RowsCall& call) : call(call), w(call.weight) {}

    int64_t chunks() const { return (call.count + SHARE - 1) / SHARE; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * SHARE, call.count);
        for (int64_t n = chunk * SHARE; n < last; n++) one(call.ids[n], call.y + n * w.inputs);
    }

    void one(int64_t id, bf16* y) const {
        const uint8_t *at = w.panel(id / PANEL), *end = w.panel(id / PANEL + 1);
        if (w.form.whole) return whole(id % PANEL, at, y);
        if (w.form.bits == 16) return pick(id % PANEL, tiled((const bf16*)at, at + AHEAD, end), y);
        with_form(w.form, [&](auto bits, auto shifts) { pick(id % PANEL, Codes<bits, shifts>(w, at), y); });
    }

    // Output `n` of a panel of whole numbers.
    void whole(int64_t n, const uint8_t* panel, bf16* y) const {
        const __m512 scale = _mm512_set1_ps(((const float*)panel)[n]);
        const auto* at = (const bf16*)(panel + w.form.head(w.inputs));
        Nibbles nibbles(w, panel, 0);
        for (int64_t k = 0; k < w.inputs; k += 64, at += 64 * PANEL / 2) {
            const bf16* quad = (w.form.bits == 4 ? nibbles.block() : at) + n / 16 * 512 + n % 16 * 2;
            alignas(64) int8_t numbers[64];
            for (int64_t j = 0; j < 16; j++, quad += 32) memcpy(numbers + 4 * j, quad, 4);
            for (int64_t i = 0; i < std::min<int64_t>(64, w.inputs - k); i += 16, y += 16)
                store(y, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((__m128i*)(numbers + i)))), scale));
        }
    }

    // Output `n` of the panel that `source` goes through.
    template <class Source>
    void pick(int64_t n, Source source, bf16* y) const {
        for (int64_t k = 0; k < w.inputs; k += 32) {
            const bf16* pair = source.block() + n / 16 * source.right + n % 16 * 2;
            for (int64_t j = 0; j < 16; j++, pair += source.step, y += 2) memcpy(y, pair, 2 * sizeof(bf16));
        }
    }

    const RowsCall call;
    const Packed& w;
};

}  // namespace

void rows(Team& team, const RowsCall& call) {
    const RowsJob job(call);
    team.run(job, job.chunks());
}

}  // namespace tgi
