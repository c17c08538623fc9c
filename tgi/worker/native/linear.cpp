// Matrix products with weights that were packed once: y = then(x w^T + plus + bias).
//
// A row's sums run over the inputs in the same order however many rows there are, so its result depends on nothing but
// the row. Few rows read a panel of the weight once, from end to end. Many go over it in parts that stay in the core's
// first cache, while the rows stay in its second one and pass the first by; if there are several parts, sums wait in
// float32, which changes no bit of them. AMX computes the sums of some rows while those of the rows before are finished.
#include "linear.h"

#include <unistd.h>

#include <algorithm>

#include "codes.h"
#include "finish.h"
#include "product.h"
#include "shares.h"

namespace tgi {
namespace {

constexpr int64_t PART = 576;  // inputs of a panel that are computed together: 36 KB of a first cache of 48
constexpr int64_t MOST = 512;  // rows of a chunk: weights come from memory once for each,
constexpr int64_t LEAST = 256;  // or fewer, if that lets x stay in half of the core's second cache
constexpr int64_t WAITING = 4096;  // rows of sums that wait: 512 KB, a quarter of a second cache of 2 MB

// Rows of so many inputs that stay in half of a core's second cache.
int64_t held(int64_t inputs) {
    static const int64_t size = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 20);
    return size / 2 / (int64_t)sizeof(bf16) / inputs;
}

// Rows of a chunk, in as few groups as can be.
int64_t height(const LinearCall& call) {
    const int64_t most = std::clamp(held(call.weight.inputs), LEAST, MOST);
    const int64_t tiles = (call.rows + MOST_ROWS - 1) / MOST_ROWS, least = (call.rows + most - 1) / most;
    return (tiles + least - 1) / least * MOST_ROWS;
}

struct LinearJob final : Job {
    LinearJob(const LinearCall& called, int64_t threads)
        : call(called), w(call.weight), shares(call.rows, height(call), w.panels(), threads) {}

    void run(int64_t chunk) const override {
        auto [row, rows, first, last] = shares.chunk(chunk);
        const uint8_t* end = w.panel(last);
        ask(w.panel(first), std::min((end - w.panel(first)) / LINE, AHEAD / LINE));
        if (rows > ROWS_AT_ONCE && w.form.bits == 16)
            return with_then(call.then, [&](auto then) { many<then>(row, rows, first, last); });
        if (rows <= ROWS_AT_ONCE) prepare(rows);
        if (rows <= ROWS_OF_TWO && w.form.bits < 16)
            with_form(w.form, [&](auto bits, auto shifts) { first = two<Codes<bits, shifts>>(row, rows, first, last); });
        for (int64_t number = first; number < last; number++) {
            const uint8_t* at = w.panel(number);
            if (w.form.bits == 16) panel(number, row, rows, tiled((const bf16*)at, at + AHEAD, end));
            else with_form(w.form, [&](auto bits, auto shifts) { panel(number, row, rows, Codes<bits, shifts>(w, at)); });
        }
    }

    // Many rows from `row` on times some panels of numbers, in blocks of rows. The last block begins early enough to be
    // as high as the others; what others have finished, it leaves alone.
    template <Then then>
    void many(int64_t row, int64_t rows, int64_t first, int64_t last) const {
        alignas(64) static thread_local float sums[WAITING][COLUMNS];
        const int64_t high = std::min(rows, MOST_ROWS), blocks = (rows + high - 1) / high;
        const int64_t parts = (w.inputs + PART - 1) / PART, part = (w.inputs / 32 + parts - 1) / parts * 32;
        // If the second cache holds the rows, one panel after the other; if not, a part of the rows times several panels.
        const int64_t together = rows <= held(w.inputs) ? 1 : WAITING / (blocks * high);
        Unfinished<then> before(call);
        prepare(high);
        for (int64_t from = first, to; from < last; from = to) {
            to = std::min(from + together, last);
            for (int64_t k = 0; k < w.inputs; k += part) {
                const int64_t depth = std::min(part, w.inputs - k), some = (high * 32 + depth - 1) / depth;
                for (int64_t number = from; number < to; number++) {
                    // Each block asks for its share of what comes next.
                    const auto* next = (const uint8_t*)(number + 1 < to       ? place(number + 1, k)
                                                        : k + part < w.inputs ? place(from, k + part)
                                                                              : place(to, 0));
                    Columns columns = tiled(place(number, k), next, std::min(next + part * PANEL * 2, w.panel(last)));
                    columns.lines = (columns.lines + blocks - 1) / blocks;
                    for (int64_t block = 0; block < blocks; block++, columns.at -= depth * PANEL) {
                        const int64_t done = block * high, start = std::min(done, rows - high);
                        const PassingRows x{{call.x + (row + start) * w.inputs + k, w.inputs}};
                        float* c = sums[(parts > 1 ? (number - from) * blocks + block : block % 2) * high];
                        const auto meanwhile = [&] { before.some(some); };
                        if (k) product<true>(x, high, columns, depth, c, COLUMNS, meanwhile);
                        else product(x, high, columns, depth, c, COLUMNS, meanwhile);
                        before.rest();
                        if (k + part < w.inputs) continue;
                        before.put(row + done, std::min(rows - done, high), number * PANEL, c + (done - start) * COLUMNS);
                    }
                }
            }
        }
        before.rest();
    }

    // Where the inputs from `k` on of a panel of numbers stand.
    const bf16* place(int64_t number, int64_t k) const { return (const bf16*)w.panel(number) + k * PANEL; }

    // The rows from `row` on times the panels up to the first one that is left, which is the last one if they are odd. Each
    // is computed together with one from the other half: what memory brings comes slowly at the beginning of each page of
    // 4 KB, and two that are read at once are seldom there at the same time.
    template <class Source>
    int64_t two(int64_t row, int64_t rows, int64_t first, int64_t last) const {
        alignas(64) float sums[2 * ROWS_OF_TWO][COLUMNS];
        const int64_t half = (last - first) / 2;
        for (int64_t number = first; number < first + half; number++) {
            Source left(w, w.panel(number)), right(w, w.panel(number + half));
            product_of_two(call.x + row * w.inputs, w.inputs, rows, left, right, w.inputs, sums[0]);
            finish(call, row, rows, number * PANEL, sums[0]);
            finish(call, row, rows, (number + half) * PANEL, sums[rows]);
        }
        return first + 2 * half;
    }

    // The rows from `row` on times one panel.
    template <class Source>
    void panel(int64_t number, int64_t row, int64_t rows, Source source) const {
        alignas(64) static thread_local float sums[MOST][COLUMNS];
        if (rows <= ROWS_AT_ONCE) {
            product(call.x + row * w.inputs, w.inputs, rows, source, w.inputs, sums[0], COLUMNS);
            return finish(call, row, rows, number * PANEL, sums[0]);
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
                if (k + PART >= w.inputs) finish(call, row + done, count, number * PANEL, sums[done]);
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

    const LinearCall call;
    const Packed& w;
    const Shares shares;
};

}  // namespace

void linear(Team& team, const LinearCall& call) {
    if (call.rows == 0) return;
    const LinearJob job(call, team.threads());
    team.run(job, job.shares.chunks());
}

}  // namespace tgi
