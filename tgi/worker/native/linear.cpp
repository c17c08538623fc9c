// Matrix products with weights that were packed once: y = then(x w^T + plus + bias).
//
// A row's sums run over the inputs in the same order however many rows there are, so its result depends on nothing but
// the row. Few rows read a panel of the weight once, from end to end. Many go over it in parts that stay in the core's
// first cache, while the rows stay in its second one; their sums wait in float32, which changes no bit of them.
#include "linear.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "codes.h"
#include "product.h"

namespace tgi {
namespace {

__m512 score(__m512 sum, const Scoring& how) {
    const __m512 scaled = _mm512_mul_ps(sum, _mm512_set1_ps(how.scale));
    return how.cap ? _mm512_mul_ps(tanh(_mm512_mul_ps(scaled, _mm512_set1_ps(1 / how.cap))), _mm512_set1_ps(how.cap)) : scaled;
}

constexpr int64_t PART = 256;         // inputs of a panel that are computed together
constexpr int64_t MOST = 256;         // rows of a chunk,
constexpr int64_t LEAST = 64;         // or fewer, so that x stays in the core's second cache

// Bytes of a core's second cache.
int64_t second_cache() {
    static const int64_t size = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 20);
    return size;
}

// What becomes of the sums [rows][32] of some rows, for the outputs from `at` on.
template <Then then>
void finish(const LinearCall& call, int64_t first, int64_t rows, int64_t at, const float* sums) {
    const int64_t outputs = call.weight.outputs, left = std::min(outputs - at, PANEL);
    const __mmask32 all = (1ull << left) - 1;
    const __mmask16 there[2] = {(__mmask16)all, (__mmask16)(all >> 16)};
    __m512 bias[2] = {};
    for (int half = 0; call.bias && half < 2; half++)
        bias[half] = _mm512_maskz_loadu_ps(there[half], call.bias + at + 16 * half);
    for (int64_t row = first; row < first + rows; row++, sums += COLUMNS) {
        const int64_t to = row * outputs + at;
        __m512 y[2];
        for (int half = 0; half < 2; half++) {
            y[half] = _mm512_load_ps(sums + 16 * half);
            if (call.bias) y[half] = _mm512_add_ps(y[half], bias[half]);
            if (call.plus) {
                const float* plus = call.plus + row * call.plus_step + at + 16 * half;
                y[half] = _mm512_add_ps(y[half], _mm512_maskz_loadu_ps(there[half], plus));
            }
            if (then == Then::silu) y[half] = silu(y[half]);
            if (then == Then::gelu) y[half] = gelu(y[half]);
            if (then == Then::gelu_tanh) y[half] = gelu_tanh(y[half]);
            if (then == Then::score) y[half] = score(y[half], call.scoring);
            if (then == Then::add || then == Then::mul) {
                const __m256i bits = _mm256_maskz_loadu_epi16(there[half], call.other + to + 16 * half);
                const __m512 other = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
                y[half] = then == Then::add ? _mm512_add_ps(y[half], other) : _mm512_mul_ps(y[half], other);
            }
            if (call.wide) _mm512_mask_storeu_ps(call.wide + to + 16 * half, there[half], y[half]);
        }
        if (call.peaks) {
            for (int half = 0; half < 2; half++) y[half] = _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), there[half], y[half]);
            call.peaks->put(row, at / PANEL, y[0], y[1]);
        } else if (!call.wide) _mm512_mask_storeu_epi16(call.y + to, all, (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]));
    }
}

// A chunk is some rows times some panels. The first ones that are begun have many panels, which are read from end to end,
// and the last ones few, so that all threads are done at about the same time (Hummel, Schonberg and Flynn, 1992).
struct LinearJob final : Job {
    LinearJob(const LinearCall& called, int64_t threads) : call(called), w(call.weight) {
        const int64_t most = std::clamp(second_cache() * 3 / 4 / (int64_t)sizeof(bf16) / w.inputs, LEAST, MOST);
        const int64_t tiles = (call.rows + MOST_ROWS - 1) / MOST_ROWS, least = (call.rows + most - 1) / most;
        height = (tiles + least - 1) / least * MOST_ROWS;
        groups = (call.rows + height - 1) / height;
        for (int64_t left = w.panels(); left > 0;) {
            const int64_t share = (left + 2 * threads - 1) / (2 * threads);
            for (int64_t n = 0; n < threads && left > 0; n++, left -= share) ends.push_back(left);
        }
        std::reverse(ends.begin(), ends.end());
        ends.insert(ends.begin(), 0);
    }

    int64_t chunks() const { return shares() * groups; }
    int64_t shares() const { return ends.size() - 1; }

    void run(int64_t chunk) const override {
        const int64_t row = chunk / shares() * height, rows = std::min(call.rows - row, height);
        const int64_t first = ends[chunk % shares()], last = ends[chunk % shares() + 1];
        const uint8_t* end = w.panel(last);
        ask(w.panel(first), std::min((end - w.panel(first)) / LINE, AHEAD / LINE));
        if (rows <= ROWS_AT_ONCE) prepare(rows);
        for (int64_t number = first; number < last; number++) {
            const uint8_t* at = w.panel(number);
            if (w.form.bits == 16) panel(number, row, rows, tiled((const bf16*)at, at + AHEAD, end));
            else with_form(w.form, [&](auto bits, auto shifts) { panel(number, row, rows, Codes<bits, shifts>(w, at)); });
        }
    }

    // The rows from `row` on times one panel.
    template <class Source>
    void panel(int64_t number, int64_t row, int64_t rows, Source source) const {
        alignas(64) static thread_local float sums[MOST][COLUMNS];
        if (rows <= ROWS_AT_ONCE) {
            product(call.x + row * w.inputs, w.inputs, rows, source, w.inputs, sums[0], COLUMNS);
            return finished(row, rows, number * PANEL, sums[0]);
        }
        for (int64_t k = 0; k < w.inputs; k += PART) {
            const int64_t depth = std::min(PART, w.inputs - k);
            Columns columns = part(source, depth, (rows + MOST_ROWS - 1) / MOST_ROWS);
            for (int64_t done = 0; done < rows; done += MOST_ROWS) {
                const int64_t count = std::min(rows - done, MOST_ROWS);
                if (done == 0 || count < MOST_ROWS) prepare(count);
                const bf16* x = call.x + (row + done) * w.inputs + k;
                if (k) product<true>(x, w.inputs, count, columns, depth, sums[done], COLUMNS);
                else product(x, w.inputs, count, columns, depth, sums[done], COLUMNS);
                if (k + PART >= w.inputs) finished(row + done, count, number * PANEL, sums[done]);
                columns.at -= depth * PANEL;
            }
        }
    }

    // The next inputs of a panel, for so many products. Each asks for its share of those that follow.
    static Columns part(Columns& source, int64_t depth, int64_t products) {
        Columns found = tiled(source.at, (const uint8_t*)(source.at + depth * PANEL), source.end);
        found.lines = (found.lines + products - 1) / products;
        source.at += depth * PANEL;
        return found;
    }

    template <int bits, bool shifts>
    static Columns part(Codes<bits, shifts>& source, int64_t depth, int64_t) {
        alignas(64) static thread_local bf16 room[PART * PANEL];
        for (int64_t k = 0; k < depth; k += 32) source.next(room + k * PANEL);
        return tiled(room);
    }

    void finished(int64_t row, int64_t rows, int64_t at, const float* sums) const {
        switch (call.then) {
            case Then::none: return finish<Then::none>(call, row, rows, at, sums);
            case Then::silu: return finish<Then::silu>(call, row, rows, at, sums);
            case Then::gelu: return finish<Then::gelu>(call, row, rows, at, sums);
            case Then::gelu_tanh: return finish<Then::gelu_tanh>(call, row, rows, at, sums);
            case Then::add: return finish<Then::add>(call, row, rows, at, sums);
            case Then::mul: return finish<Then::mul>(call, row, rows, at, sums);
            case Then::score: return finish<Then::score>(call, row, rows, at, sums);
        }
    }

    const LinearCall call;
    const Packed& w;
    int64_t groups, height;     // groups of so many rows
    std::vector<int64_t> ends;  // 0, and the panels before the end of each share
};

}  // namespace

void linear(Team& team, const LinearCall& call) {
    if (call.rows == 0) return;
    const LinearJob job(call, team.threads());
    team.run(job, job.chunks());
}

}  // namespace tgi
