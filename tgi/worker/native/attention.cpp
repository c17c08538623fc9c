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
#include "tile.h"

namespace tgi {
namespace {

constexpr int64_t PART = 512;  // positions after which sums begin anew
constexpr int64_t FEW = 16;    // so many tiles, and fewer, are divided into their parts

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

    void run(int64_t chunk, int64_t) const override {
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
        const int64_t dim = cache.head_dim;
        const Found part(desk().part, dim), whole(desk().whole, dim);
        const Tile tile(cache, step, call, at, placing);
        tile.begin();
        whole.clear(at.rows, dim);
        for (int64_t from = at.lowest / PART * PART; from < at.end; from += PART) {
            tile.compute(from, from + PART, part);
            whole.add(part, at.rows, dim);
        }
        tile.finish(whole);
    }

    void run_part(const Range& at, int64_t tile, int64_t number) const {
        const int64_t dim = cache.head_dim, size = Found::size(dim);
        float* const mine = aligned(shared.found.data()) + tile * parts * size;
        if (number >= at.lowest / PART && number * PART < at.end) {
            Range here = at;
            here.lowest = std::max(at.lowest, number * PART), here.end = std::min(at.end, (number + 1) * PART);
            const Tile tile(cache, step, call, here, placing);
            tile.begin();
            tile.compute(number * PART, here.end, Found(mine + number * size, dim));
        }
        if (shared.undone[tile].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        const Found whole(desk().whole, dim);
        whole.clear(at.rows, dim);
        for (int64_t n = at.lowest / PART; n * PART < at.end; n++) whole.add(Found(mine + n * size, dim), at.rows, dim);
        Tile(cache, step, call, at, placing).finish(whole);
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
    // Where every row has one token, whoever sees its key and value also writes them, if that is one tile alone.
    const bool alone = step.bounds[step.rows] == step.rows && cache.heads / cache.kv_heads <= TILE;
    const PlaceJob placing(cache, step, call.qkv);
    if (!alone) team.run(placing, placing.chunks());
    static thread_local Shared shared;
    const AttendJob job(cache, step, call, alone, shared);
    team.run(job, job.chunks());
}

}  // namespace tgi
