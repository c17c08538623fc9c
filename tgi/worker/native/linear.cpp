// Matrix products with weights that were packed once: y = then(x w^T + plus + bias).
//
// A row's sums run over the inputs in the same order however many rows there are, so its result depends on nothing but
// the row. Few rows read a panel of the weight once, from end to end. Many go over it in parts that stay in the core's
// first cache, while the rows stay in its second one and pass the first by; if there are several parts, sums wait as
// they are, which changes no bit of them. AMX computes the sums of some rows while those of the rows before are finished.
#include "linear.h"

#include <unistd.h>

#include <algorithm>

#include "finish.h"
#include "numbers.h"
#include "product.h"
#include "shares.h"

namespace tgi {
namespace {

constexpr int64_t PART = 576;  // inputs of a panel that are computed together: 36 KB of a first cache of 48
constexpr int64_t MOST = 512;  // rows of a chunk: weights come from memory once for each,
constexpr int64_t LEAST = 256;  // or fewer, if that lets x stay in half of the core's second cache
constexpr int64_t WAITING = 4096;  // rows of sums that wait: 512 KB, a quarter of a second cache of 2 MB

// Bytes of the next weight for which a thread asks while it waits: an eighth of a second cache of 2 MB.
constexpr int64_t EARLY = 1 << 18;

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

// Where a gate lies beside a weight, what becomes of the sums of the latter: they multiply what the gate has left, rounded
// like any result. Biases and what adapters add are those of the gate, then those of the other.
LinearCall gated_by(LinearCall call) {
    if (call.bias) call.bias += call.weight.outputs;
    if (call.plus) call.plus += call.weight.outputs;
    call.other = call.y, call.then = Then::mul;
    return call;
}

// Inputs are counted in pairs of bytes: each is a number of bfloat16, or two of the whole ones.
template <class Numbers>
struct LinearJob final : Job {
    using Sum = typename Numbers::Sum;
    static constexpr int64_t HIGH = Numbers::HIGH;

    LinearJob(const LinearCall& called, const Numbers& numbers, int64_t threads)
        : call(called), numbers(numbers), w(call.weight), all(w.form.whole ? w.form.filled(w.inputs) / 2 : w.inputs),
          gated(gated_by(call)), shares(call.rows, height(call), w.pieces(), threads) {}

    void run(int64_t, int64_t thread) const override {
        for (Shares::Chunk chunk; shares.claim(thread, chunk);) part(chunk);
    }

    // The beginning of its stretch of the next weight, for which it can ask before the others have come to the end of this.
    Early next(int64_t thread) const override {
        if (!call.next) return {};
        const auto panel = [&, weight = *call.next](int64_t thread) {
            return weight.panel(Shares::begin(weight.pieces(), thread, shares.threads()) * weight.form.weights);
        };
        return {panel(thread), std::min(panel(thread + 1), panel(thread) + EARLY)};
    }

    void part(const Shares::Chunk& chunk) const {
        const auto [row, rows, left, right] = chunk;
        const int64_t first = left * w.form.weights, last = right * w.form.weights;
        const uint8_t* end = w.panel(w.panels());
        ask(w.panel(first), std::min((end - w.panel(first)) / LINE, AHEAD / LINE));
        if (rows <= std::min(HIGH, ROWS_AT_ONCE)) few(row, rows, first, last);
        else with_then(call.then, [&](auto then) { many<then>(row, rows, first, last); });
    }

    // What becomes of the sums of a panel, and the first of its outputs.
    const LinearCall& of(int64_t number) const { return number % w.form.weights ? gated : call; }
    int64_t output(int64_t number) const { return number / w.form.weights * PANEL; }

    // Few rows times some panels. Each panel is computed together with one of the other half, if that can be: memory is
    // slow at the beginning of each page of 4 KB, and two that are read by turns are seldom there at the same time.
    void few(int64_t row, int64_t rows, int64_t first, int64_t last) const {
        alignas(64) Sum sums[MOST_ROWS][COLUMNS];
        const bool pairs = numbers.pairs(rows);
        const int64_t half = pairs ? (last - first) / w.form.weights / 2 * w.form.weights : 0;
        const Rows x = numbers.rows(row, rows);
        prepare({x.at, x.step, x.first, pairs ? x.first : x.second, x.apart});
        const auto put = [&](int64_t number, const Sum* found) {
            finish(of(number), row, rows, output(number), numbers.few_found(found, row, w.panel(number)));
        };
        numbers.panels(w.panel(w.panels()), [&](auto columns) {
            for (int64_t number = first; number < first + half; number++) {
                numbers.few(x, all, sums[0], columns(w.panel(number)), columns(w.panel(number + half)));
                put(number, sums[0]), put(number + half, sums[16]);
            }
            for (int64_t number = first + 2 * half; number < last; number++) {
                numbers.few(x, all, sums[0], columns(w.panel(number)));
                put(number, sums[0]);
            }
        });
    }

    // Many rows from `row` on times some panels, in blocks of rows. The last block begins early enough to be
    // as high as the others; what others have finished, it leaves alone.
    template <Then then>
    void many(int64_t row, int64_t rows, int64_t first, int64_t last) const {
        alignas(64) static thread_local Sum sums[WAITING][COLUMNS];
        const int64_t high = std::min(rows, HIGH), blocks = (rows + high - 1) / high;
        const int64_t unit = w.form.group ? w.form.unit() : 32, parts = (all + PART - 1) / PART;
        const int64_t part = (all / unit + parts - 1) / parts * unit;
        // If the second cache holds the rows, one panel after the other; if not, a part of the rows times several panels.
        const int64_t together = rows <= held(all) ? 1 : WAITING / (blocks * MOST_ROWS);
        Unfinished<then, typename Numbers::Found> before;
        prepare(numbers.rows(row, high));
        for (int64_t from = first, to; from < last; from = to) {
            to = std::min(from + together, last);
            for (int64_t k = 0; k < all; k += part) {
                const int64_t depth = std::min(part, all - k), some = (high * 32 + depth - 1) / depth;
                for (int64_t number = from; number < to; number++) {
                    const auto* next = (const uint8_t*)(number + 1 < to ? place(number + 1, k)
                                                        : k + part < all ? place(from, k + part)
                                                                         : place(to, 0));
                    Columns columns = this->columns(number, k, depth, next, w.panel(w.panels()));
                    // Each block asks for its share of what comes next.
                    columns.lines = (columns.lines + blocks - 1) / blocks;
                    for (int64_t block = 0; block < blocks; block++, columns.at -= depth * PANEL) {
                        const int64_t done = block * high, start = std::min(done, rows - high);
                        PassingRows x{numbers.rows(row + start, high)};
                        x.at += k;
                        Sum* c = sums[(parts > 1 ? (number - from) * blocks + block : block % 2) * MOST_ROWS];
                        const auto meanwhile = [&] { before.some(some); };
                        if (k) product<true>(x, columns, depth, c, COLUMNS, meanwhile);
                        else product(x, columns, depth, c, COLUMNS, meanwhile);
                        before.rest();
                        if (k + part < all) continue;
                        const auto found = numbers.found(c + (done - start) * COLUMNS, row + done, w.panel(number));
                        before.put(of(number), row + done, std::min(rows - done, high), output(number), found);
                    }
                }
            }
        }
        before.rest();
    }

    // Where the inputs from `k` on of a panel of numbers stand.
    const bf16* place(int64_t number, int64_t k) const { return (const bf16*)(w.panel(number) + w.form.head(w.inputs)) + k * PANEL; }

    // So many inputs from `k` on of a panel, `next` being what is needed after them.
    Columns columns(int64_t number, int64_t k, int64_t depth, const uint8_t* next, const uint8_t* end) const {
        if (w.form.numbers()) return tiled(place(number, k), next, std::min(next + depth * PANEL * 2, end));
        alignas(64) static thread_local bf16 room[(PART + 128) * PANEL];  // a part is made of whole groups
        const auto fill = [&](auto source) {
            for (int64_t done = 0; done < depth; done += 32) source.next(room + done * PANEL);
        };
        if constexpr (std::is_same_v<Sum, int32_t>) fill(Nibbles(w, w.panel(number), 2 * k));
        else with_form(w.form, [&](auto bits, auto shifts) {
            fill(Codes<bits, shifts>(w, w.panel(number) + w.form.bytes(k)));
        });
        return tiled(room);
    }

    const LinearCall call;
    const Numbers numbers;
    const Packed& w;
    const int64_t all;
    const LinearCall gated;
    mutable Shares shares;
};

template <class Numbers>
void run(Team& team, const LinearCall& call, const Numbers& numbers) {
    const LinearJob<Numbers> job(call, numbers, team.threads());
    team.run(job, job.shares.threads());
}

}  // namespace

void linear(Team& team, const LinearCall& call) {
    if (call.rows == 0) return;
    if (call.weight.form.whole) run(team, call, Wholes{call, planes(team, call)});
    else run(team, call, Floats{call});
}

}  // namespace tgi
