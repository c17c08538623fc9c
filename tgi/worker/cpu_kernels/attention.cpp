// Attention over paged keys and values, in tiles of up to 32 rows; a row is one query head of one token.
//
// A tile has the query heads of one KV head, for consecutive tokens of one sequence. It goes over the keys in blocks of
// 64 positions and keeps a running maximum and sum for each row (Milakov and Gimelshein, 2018; Dao et al., 2022).
// Masked positions have scores of -infinity and add exact zeros. After every 512 positions the sums start anew, and the
// parts are added in their order, so that threads can share a long context.
//
// Invariant: every row is summed in an order of its own. Blocks and parts start at multiples of their size, so the
// result of a query depends neither on the other rows of its tile, nor on the number of keys that follow, nor on the
// threads: prefill, decode and every chunking of a prompt agree bit for bit.
#include "attention.h"

#include <algorithm>
#include <atomic>

#include "kv_cache.h"
#include "attention_tile.h"

namespace tgi {
namespace {

constexpr int64_t PART_SIZE = 512;  // positions after which sums start anew
constexpr int64_t MAX_DIVIDED_TILES = 16;  // up to this many tiles are divided into parts

// State of a step; its memory is reused by the next step.
struct AttentionState {
    std::vector<int64_t> first;  // [rows + 1] tiles before each row
    std::vector<float> found;  // [tiles, parts] results of the parts
    std::atomic<int64_t> unfinished[MAX_DIVIDED_TILES];  // parts of each tile that are not computed yet
};

// The tiles of a step or, if they are few, the parts of each tile. T: the type of the numbers in the cache.
template <class T>
struct AttendJob final : Job {
    AttendJob(const KvCache& cache, const AttentionBatch& batch, const AttentionCall& call, bool writes_kv,
        AttentionState& state)
        : cache(cache), batch(batch), call(call), heads_per_kv(cache.heads / cache.kv_heads), writes_kv(writes_kv),
            state(state) {
        auto& first = state.first;
        first.assign(1, 0);
        int64_t longest = 0;
        for (int64_t row = 0; row < batch.rows; row++) {
            const int64_t rows = (batch.bounds[row + 1] - batch.bounds[row]) * heads_per_kv;
            first.push_back(first.back() + (rows + TILE_ROWS - 1) / TILE_ROWS);
            longest = std::max<int64_t>(longest, batch.context_lengths[row]);
        }
        tiles = first.back() * cache.kv_heads;
        if (tiles > MAX_DIVIDED_TILES || longest <= PART_SIZE) return;
        parts = (longest + PART_SIZE - 1) / PART_SIZE;
        const size_t size = tiles * parts * PartialAttention::size(value_dim()) + 16;
        if (state.found.size() < size) state.found.resize(size);
        for (int64_t tile = 0; tile < tiles; tile++) state.unfinished[tile] = parts;
    }

    int64_t chunks() const { return parts ? tiles * parts : tiles; }

    void run(int64_t chunk, int64_t) const override {
        if (parts) return run_part(range(chunk / parts), chunk / parts, chunk % parts);
        run_tile(range(chunk));
    }

  private:
    TileRange range(int64_t tile) const {
        // Tiles of one head follow each other: sequences with a common prefix then find its pages in the core's cache.
        const auto& first = state.first;
        const int64_t head = tile / first.back(), at = tile % first.back();
        const int64_t row = std::upper_bound(first.begin(), first.end(), at) - first.begin() - 1;
        const int64_t count = batch.bounds[row + 1] - batch.bounds[row], begin = (at - first[row]) * TILE_ROWS;
        const int64_t rows = std::min(count * heads_per_kv - begin, TILE_ROWS),
            before = batch.context_lengths[row] - count;
        const int64_t lowest = std::max<int64_t>(0, call.first_seen(before + begin / heads_per_kv));
        const int64_t latest = (begin + rows - 1) / heads_per_kv,
            last = call.last_seen(batch, batch.bounds[row] + latest, before + latest);
        return {row, head, begin, rows, lowest, std::min<int64_t>(last + 1, batch.context_lengths[row])};
    }

    int64_t value_dim() const { return padded_to_32(cache.result_dim()); }

    void run_tile(const TileRange& at) const {
        const int64_t dim = value_dim();
        const PartialAttention part(tile_workspace().part, dim), total(tile_workspace().total, dim);
        const AttentionTile<T> tile(cache, batch, call, at, writes_kv);
        tile.begin();
        tile.start_total(total);
        for (int64_t from = at.lowest / PART_SIZE * PART_SIZE; from < at.end; from += PART_SIZE) {
            tile.compute(from, from + PART_SIZE, part);
            total.add(part, at.rows, dim);
        }
        tile.store_result(total);
    }

    void run_part(const TileRange& at, int64_t tile, int64_t number) const {
        const int64_t dim = value_dim(), size = PartialAttention::size(dim);
        float* const mine = aligned(state.found.data()) + tile * parts * size;
        if (number >= at.lowest / PART_SIZE && number * PART_SIZE < at.end) {
            TileRange here = at;
            here.lowest = std::max(at.lowest, number * PART_SIZE), here.end = std::min(at.end,
                (number + 1) * PART_SIZE);
            const AttentionTile<T> tile(cache, batch, call, here, writes_kv);
            tile.begin();
            tile.compute(number * PART_SIZE, here.end, PartialAttention(mine + number * size, dim));
        }
        if (state.unfinished[tile].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        const PartialAttention total(tile_workspace().total, dim);
        const AttentionTile<T> whole(cache, batch, call, at, writes_kv);
        whole.start_total(total);
        for (int64_t n = at.lowest / PART_SIZE; n * PART_SIZE < at.end; n++) total.add(PartialAttention(mine +
            n * size, dim), at.rows, dim);
        whole.store_result(total);
    }

    static float* aligned(float* at) { return at + (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float); }

    const KvCache& cache;
    const AttentionBatch& batch;
    const AttentionCall& call;
    const int64_t heads_per_kv;
    const bool writes_kv;
    AttentionState& state;
    int64_t tiles, parts = 0;
};

template <class T>
void attend(ThreadPool& pool, const KvCache& cache, const AttentionBatch& batch, const AttentionCall& call) {
    // If every sequence has one token, its tile also writes its key and value, provided that the token is one tile.
    const bool alone = !cache.shared && batch.bounds[batch.rows] == batch.rows &&
        cache.heads / cache.kv_heads <= TILE_ROWS;
    const WriteKvJob<T> write_job(cache, batch, call.qkv);
    if (!alone && !cache.shared) pool.run(write_job, write_job.chunks());
    static thread_local AttentionState state;
    const AttendJob<T> job(cache, batch, call, alone, state);
    pool.run(job, job.chunks());
}

}  // namespace

void write_kv(ThreadPool& pool, const KvCache& cache, const int64_t* slots, int64_t tokens, const Element* pairs) {
    const int32_t bounds[] = {0, int32_t(tokens)};
    const AttentionBatch batch{slots, bounds, nullptr, nullptr, 1, 0};
    const WriteKvJob<Element> job(cache, batch, pairs);
    pool.run(job, job.chunks());
}

void attention(ThreadPool& pool, const KvCache& cache, const AttentionBatch& batch, const AttentionCall& call) {
    switch (cache.form) {
        case KvForm::BF16: return attend<bf16>(pool, cache, batch, call);
        case KvForm::INT8: return attend<int8_t>(pool, cache, batch, call);
        case KvForm::ELEMENT: return attend<Element>(pool, cache, batch, call);
    }
}

}  // namespace tgi
