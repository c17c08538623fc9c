// Attention over paged keys and values, in tiles of up to 32 rows: a row is one query head of one token.
//
// A tile has the query heads of one KV head, of as many consecutive tokens of a row as fit. It goes over the keys in
// blocks of 64 positions, and keeps a running maximum and sum for each of its rows (Milakov and Gimelshein, 2018; Dao et
// al., 2022). What a query must not see counts as -infinity and adds exact zeros. After every 512 positions it begins
// anew, and these parts are added up in their order, so that threads can share a long context. Blocks and parts begin at
// multiples of their size, so a query's result depends neither on the other rows of its tile, nor on how many keys
// follow, nor on who computes which part: prefill, decode and every division of a prompt into chunks agree bit for bit.
#include "attention.h"

#include <algorithm>
#include <atomic>

#include "cache.h"
#include "found.h"
#include "product.h"

namespace tgi {
namespace {

constexpr int64_t BLOCK = 64;    // positions that are computed together
constexpr int64_t PART = 512;    // positions after which sums begin anew
constexpr int64_t WIDEST = 256;  // head_dim
constexpr int64_t FEW = 16;      // so many tiles, and fewer, are divided into their parts
constexpr float LOG2_E = 1.44269504f;

// Some rows of one KV head, and the positions that they see.
struct Range {
    int64_t row, head, begin, rows, lowest, end;
};

// The values of a block, 32 columns of two pages, as `product` takes them.
struct Values {
    const bf16* block() { return pages[next++]; }

    const bf16* pages[2];
    int64_t step, right = 32, next = 0;
};

// What one thread needs to compute a tile.
struct Desk {
    alignas(64) bf16 queries[TILE * WIDEST];
    alignas(64) float scores[TILE][BLOCK];
    alignas(64) bf16 shares[TILE][BLOCK];
    alignas(64) float part[Found::size(WIDEST)];
    alignas(64) float whole[Found::size(WIDEST)];
};

Desk& desk() {
    static thread_local Desk one;
    return one;
}

// What a step needs once, and the next one again.
struct Shared {
    std::vector<int64_t> first;        // [rows + 1] tiles before each row
    std::vector<float> found;          // [tiles, parts] what each part has found
    std::atomic<int64_t> undone[FEW];  // parts of each tile
};

// The tiles of a step or, where they are few, the parts of each.
struct AttendJob final : Job {
    AttendJob(const Cache& cache, const Step& step, const Attention& call, bool placing, Shared& shared)
        : cache(cache), step(step), call(call), group(cache.heads / cache.kv_heads), placing(placing), shared(shared) {
        auto& first = shared.first;
        first.assign(1, 0);
        int64_t longest = 0;
        for (int64_t row = 0; row < step.rows; row++) {
            const int64_t rows = (step.bounds[row + 1] - step.bounds[row]) * group;
            first.push_back(first.back() + (rows + TILE - 1) / TILE);
            longest = std::max<int64_t>(longest, step.contexts[row]);
        }
        tiles = first.back() * cache.kv_heads;
        if (tiles > FEW || longest <= PART) return;
        parts = (longest + PART - 1) / PART;
        const size_t size = tiles * parts * Found::size(cache.head_dim) + 16;
        if (shared.found.size() < size) shared.found.resize(size);
        for (int64_t tile = 0; tile < tiles; tile++) shared.undone[tile] = parts;
    }

    int64_t chunks() const { return parts ? tiles * parts : tiles; }

    void run(int64_t chunk) const override {
        if (parts) return run_part(range(chunk / parts), chunk / parts, chunk % parts);
        run_tile(range(chunk));
    }

  private:
    Range range(int64_t tile) const {
        // Tiles of one head follow each other: rows that share a prefix find its pages in the core's cache.
        const auto& first = shared.first;
        const int64_t head = tile / first.back(), at = tile % first.back();
        const int64_t row = std::upper_bound(first.begin(), first.end(), at) - first.begin() - 1;
        const int64_t count = step.bounds[row + 1] - step.bounds[row], begin = (at - first[row]) * TILE;
        const int64_t rows = std::min(count * group - begin, TILE), before = step.contexts[row] - count;
        const int64_t lowest = call.window ? std::max<int64_t>(0, before + begin / group - call.window + 1) : 0;
        return {row, head, begin, rows, lowest, before + (begin + rows - 1) / group + 1};
    }

    void run_tile(const Range& at) const {
        const Found part(desk().part, cache.head_dim), whole(desk().whole, cache.head_dim);
        begin(at);
        whole.clear(at.rows, cache.head_dim);
        for (int64_t from = at.lowest / PART * PART; from < at.end; from += PART) {
            compute(at, from, part);
            whole.add(part, at.rows, cache.head_dim);
        }
        finish(at, whole);
    }

    void run_part(const Range& at, int64_t tile, int64_t number) const {
        const int64_t dim = cache.head_dim, size = Found::size(dim);
        float* const mine = aligned(shared.found.data()) + tile * parts * size;
        if (number >= at.lowest / PART && number * PART < at.end) {
            begin(at);
            compute(at, number * PART, Found(mine + number * size, dim));
        }
        if (shared.undone[tile].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        const Found whole(desk().whole, dim);
        whole.clear(at.rows, dim);
        for (int64_t n = at.lowest / PART; n * PART < at.end; n++) whole.add(Found(mine + n * size, dim), at.rows, dim);
        finish(at, whole);
    }

    int64_t token(const Range& at, int64_t r) const { return step.bounds[at.row] + (at.begin + r) / group; }

    void begin(const Range& at) const {
        const int64_t dim = cache.head_dim, stride = (cache.heads + 2 * cache.kv_heads) * dim;
        prepare(at.rows);
        for (int64_t r = 0; r < at.rows; r++) {
            const int64_t head = at.head * group + (at.begin + r) % group;
            memcpy(desk().queries + r * dim, call.qkv + token(at, r) * stride + head * dim, dim * sizeof(bf16));
        }
    }

    void finish(const Range& at, const Found& whole) const {
        const int64_t dim = cache.head_dim;
        for (int64_t r = 0; r < at.rows; r++) {
            const int64_t head = at.head * group + (at.begin + r) % group;
            bf16* to = call.y + (token(at, r) * cache.heads + head) * dim;
            const float* values = whole.values + r * dim;
            const __m512 share = _mm512_set1_ps(1.f / _mm512_reduce_add_ps(_mm512_load_ps(whole.sums + r * LANES)));
            for (int64_t d = 0; d < dim; d += 16) store(to + d, _mm512_mul_ps(_mm512_load_ps(values + d), share));
        }
    }

    // What the rows find in the part that begins at `from`.
    void compute(const Range& at, int64_t from, const Found& part) const {
        const int64_t end = std::min(from + PART, at.end);
        if (placing && end == at.end) place(cache, step, call.qkv, step.bounds[at.row], at.head);
        part.clear(at.rows, cache.head_dim);
        for (from = std::max(from, at.lowest / BLOCK * BLOCK); from < end; from += BLOCK) block(at, from, part);
    }

    void block(const Range& at, int64_t from, const Found& part) const {
        const int64_t dim = cache.head_dim, count = at.end - from > PAGE ? 2 : 1;
        const int32_t* pages = step.pages + at.row * step.width + from / PAGE;
        Desk& my = desk();
        for (int64_t n = 0; n < count; n++)
            product(my.queries, dim, at.rows, keys(cache, pages[n], at.head), PAGE, dim, my.scores[0] + n * PAGE,
                    BLOCK);
        for (int64_t r = 0; r < at.rows; r++) weigh(at, r, from, part);
        const bf16* at_first = values(cache, pages[0], at.head);
        const bf16* at_second = values(cache, pages[count - 1], at.head);
        for (int64_t d = 0; d < dim; d += COLUMNS)
            product<true>(my.shares[0], BLOCK, at.rows, Values{{at_first + 2 * d, at_second + 2 * d}, 2 * dim}, count * PAGE,
                          part.values + d, dim);
    }

    // Turns a row's scores into its shares of the values.
    void weigh(const Range& at, int64_t r, int64_t from, const Found& part) const {
        Desk& my = desk();
        const int64_t count = step.bounds[at.row + 1] - step.bounds[at.row];
        const int64_t position = step.contexts[at.row] - count + (at.begin + r) / group;
        const uint64_t sees = seen(position - from);
        const __m512 never = _mm512_set1_ps(NEVER);
        const __m512 scale = _mm512_set1_ps(call.softcap ? call.scale : call.scale * LOG2_E);
        __m512 scores[BLOCK / LANES], most = never;
        for (int n = 0; n < BLOCK / LANES; n++) {
            const __mmask16 mask = sees >> LANES * n;
            scores[n] = _mm512_mask_mul_ps(never, mask, _mm512_load_ps(my.scores[r] + LANES * n), scale);
            if (call.softcap) scores[n] = _mm512_mask_mov_ps(never, mask, capped(scores[n]));
            most = _mm512_max_ps(most, scores[n]);
        }
        if (_mm512_cmplt_ps_mask(_mm512_set1_ps(part.highest[r]), most)) raise(part, r, _mm512_reduce_max_ps(most));
        if (part.highest[r] == NEVER) {  // it sees nothing of this block and saw nothing before
            memset(my.shares[r], 0, sizeof my.shares[r]);
            return;
        }
        const __m512 highest = _mm512_set1_ps(part.highest[r]);
        __m512 sum = _mm512_load_ps(part.sums + r * LANES);
        for (int n = 0; n < BLOCK / LANES; n++) {
            const __m512 share = power(_mm512_sub_ps(scores[n], highest));
            sum = _mm512_add_ps(sum, share);
            store(my.shares[r] + LANES * n, share);
        }
        _mm512_store_ps(part.sums + r * LANES, sum);
    }

    // Fits what a row has found to a new maximum.
    void raise(const Found& part, int64_t r, float highest) const {
        const __m512 less = _mm512_set1_ps(std::exp2(part.highest[r] - highest));
        for (float* to = part.values + r * cache.head_dim; to < part.values + (r + 1) * cache.head_dim; to += LANES)
            _mm512_store_ps(to, _mm512_mul_ps(_mm512_load_ps(to), less));
        _mm512_store_ps(part.sums + r * LANES, _mm512_mul_ps(_mm512_load_ps(part.sums + r * LANES), less));
        part.highest[r] = highest;
    }

    // Which positions of a block the one that is `last` behind its first sees, as bits.
    uint64_t seen(int64_t last) const {
        if (last < 0) return 0;
        const uint64_t upper = last < BLOCK - 1 ? (uint64_t(2) << last) - 1 : ~uint64_t(0);
        const int64_t hidden = call.window ? last - call.window + 1 : 0;
        if (hidden >= BLOCK) return 0;
        return hidden > 0 ? upper >> hidden << hidden : upper;
    }

    // cap(score), as a power of 2; tanh(u) = 2 sigmoid(2 u) - 1.
    __m512 capped(__m512 score) const {
        const __m512 cap = _mm512_set1_ps(call.softcap), two = _mm512_set1_ps(2.f);
        const __m512 inner = _mm512_mul_ps(_mm512_div_ps(score, cap), two);
        const __m512 tanh = _mm512_fmsub_ps(two, sigmoid(inner), _mm512_set1_ps(1.f));
        return _mm512_mul_ps(_mm512_mul_ps(cap, tanh), _mm512_set1_ps(LOG2_E));
    }

    static float* aligned(float* at) { return at + (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float); }

    const Cache& cache;
    const Step& step;
    const Attention& call;
    const int64_t group;
    const bool placing;
    Shared& shared;
    int64_t tiles, parts = 0;
};

}  // namespace

void attend(Team& team, const Cache& cache, const Step& step, const Attention& call) {
    // Where every row has one token, whoever sees its key and value also writes them.
    const bool alone = step.bounds[step.rows] == step.rows;
    const PlaceJob placing(cache, step, call.qkv);
    if (!alone) team.run(placing, placing.chunks());
    static thread_local Shared shared;
    const AttendJob job(cache, step, call, alone, shared);
    team.run(job, job.chunks());
}

}  // namespace tgi
