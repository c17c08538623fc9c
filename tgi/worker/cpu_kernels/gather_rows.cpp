// See gather_rows.h. A row is spread over its panel: numbers are picked from it, codes are decoded as for a product.
#include "gather_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if TGI_DOT_ENGINE
#include "dot_decoders.h"
#else
#include "fma_decoders.h"
#endif

namespace tgi {
namespace {

constexpr int64_t CHUNK = 8;  // rows of a chunk

struct GatherRowsJob final : Job {
    explicit GatherRowsJob(const GatherRowsCall& call) : call(call), w(call.weight) {}

    int64_t chunks() const { return (call.count + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, call.count);
        for (int64_t n = chunk * CHUNK; n < last; n++) {
            const int64_t id = call.ids[n] - call.first;
            if (id >= 0 && id < w.outputs) one(id, call.y + n * w.inputs);
            else memset(call.y + n * w.inputs, 0, w.inputs * sizeof(Element));
        }
    }

    void one(int64_t id, Element* y) const {
        const int64_t panel = id / PANEL, n = id % PANEL;
        if (w.form.bits == 32) plain_row((const float*)w.panel(panel), n, y);
        else if (w.form.bits == 16 && w.form.half) plain_row((const f16*)w.panel(panel), n, y);
        else if (w.form.bits == 16) plain_row((const bf16*)w.panel(panel), n, y);
        else coded_row(panel, n, y);
    }

    // Output n of a panel of numbers.
    template <class T>
    void plain_row(const T* panel, int64_t n, Element* y) const {
        const T* tile = panel + n / 16 * 512;
        for (int64_t k = 0; k < w.inputs; k++)
            y[k] = convert(tile[k / 32 * 32 * PANEL + element_index<T>(k % 32, n % 16, 16)]);
    }

    static Element convert(Element x) { return x; }
    template <class T>
    static Element convert(T x) { return round_to<Element>(to_float(x)); }

#if TGI_DOT_ENGINE

    void coded_row(int64_t panel, int64_t n, Element* y) const {
        const uint8_t* at = w.panel(panel);
        if (w.form.integer) return integer_row(n, at, y);
        if (w.form.mxfp4) return grouped_row(Mxfp4Decoder(w, at, 0), n, y);
        if (w.form.floats) return grouped_row(GroupDecoder<4, false, true>(w, at, 0), n, y);
        with_shifts(w.form, [&](auto shifts) {
            if (w.form.bits == 8) grouped_row(GroupDecoder<8, shifts>(w, at, 0), n, y);
            else grouped_row(GroupDecoder<4, shifts>(w, at, 0), n, y);
        });
    }

    template <class Decoder>
    void grouped_row(Decoder source, int64_t n, Element* y) const {
        for (int64_t k = 0; k < w.inputs; k += 32) {
            const bf16* pair = source.next_block() + n / 16 * source.right + n % 16 * 2;
            for (int64_t j = 0; j < 16; j++, pair += source.step, y += 2) memcpy(y, pair, 2 * sizeof(bf16));
        }
    }

    // Output n of a panel of integers.
    void integer_row(int64_t n, const uint8_t* panel, Element* y) const {
        const Float scale = broadcast(((const float*)panel)[n]);
        const auto* at = (const bf16*)(panel + w.form.header_bytes(w.inputs));
        NibbleDecoder nibbles(w, panel, 0);
        for (int64_t k = 0; k < w.inputs; k += 64, at += 64 * PANEL / 2) {
            const bf16* quad = (w.form.bits == 4 ? nibbles.next_block() : at) + n / 16 * 512 + n % 16 * 2;
            alignas(64) int8_t numbers[64];
            for (int64_t j = 0; j < 16; j++, quad += 32) memcpy(numbers + 4 * j, quad, 4);
            for (int64_t i = 0; i < std::min<int64_t>(64, w.inputs - k); i += 16, y += 16)
                store_first(y, to_float(load(numbers + i)) * scale, w.inputs - k - i);
        }
    }

#else

    void coded_row(int64_t panel, int64_t n, Element* y) const {
        const auto grouped = [&](const auto& columns_at) { grouped_row(columns_at(panel, 0), n, y); };
        if (w.form.integer)
            with_integers(w, [&](const auto& columns_at) { integer_row(columns_at(panel, 0), panel, n, y); });
        else if (w.form.bits == 8) with_groups<CodeBlock<int8_t>>(w, grouped);
        else if (w.form.floats) with_groups<Float4Block>(w, grouped);
        else with_groups<NibbleBlock>(w, grouped);
    }

    template <class Columns>
    void grouped_row(const Columns& columns, int64_t n, Element* y) const {
        const int64_t unit = w.form.unit(), bits = w.form.bits;
        for (int64_t k = 0; k < w.inputs; k++) {
            const uint8_t* at = columns.at + k / unit * columns.unit_bytes;
            const uint8_t* header = at + k % unit / w.form.group * w.form.group_bytes();
            const float scale = columns.factor(header, 0, n);
            const uint8_t* tile = at + columns.header + (k % unit / 32 * 2 + n / 16) * 64 * bits + n % 16;
            const int64_t i = k % 32;
            const int nibble = tile[i / 2 * 16] >> i % 2 * 4 & 15;
            const float code = bits == 8 ? (int8_t)tile[16 * i] : w.form.floats ? E2M1_DOUBLED[nibble] : nibble;
            const float shift = Columns::shifts ? columns.factor(header, 1, n) : Columns::subtracts_eight ? -8 * scale : 0;
            y[k] = round_to<Element>(std::fma(code, scale, shift));
        }
    }

    template <class Columns>
    void integer_row(Columns columns, int64_t panel, int64_t n, Element* y) const {
        const float scale = ((const float*)w.panel(panel))[n];
        for (int64_t k = 0; k < w.inputs; k += 32) {
            const FmaBlock<Columns> block(columns);
            for (int64_t j = 0; j < 16; j++) {
                alignas(64) float pair[2][LANES];
                store(pair[0], block.template input<0>(j, n / 16));
                store(pair[1], block.template input<1>(j, n / 16));
                for (int64_t i = 0; i < 2 && k + 2 * j + i < w.inputs; i++)
                    y[k + 2 * j + i] = round_to<Element>(pair[i][n % 16] * scale);
            }
        }
    }

#endif

    const GatherRowsCall call;
    const PackedWeight& w;
};

}  // namespace

void gather_rows(ThreadPool& pool, const GatherRowsCall& call) {
    const GatherRowsJob job(call);
    pool.run(job, job.chunks());
}

}  // namespace tgi
