// Attention of one tile of rows: scores, online softmax and the weighted sum of the values. See attention.cpp.
#pragma once
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "kv_cache.h"
#include "online_softmax.h"
#include "engine.h"

namespace tgi {

// Prefetches the keys and values of one head in one or two pages while the block before is computed.
//
// Pages may be anywhere, and the hardware prefetcher stays within 4 KB, so the start of each page would stall. It
// follows several streams at once, which together get more memory bandwidth than one after the other: so the keys and
// values of both pages are prefetched in alternation. `to_l1`: into the L1 cache, else into the L2 cache.
class PagePrefetcher {
  public:
    PagePrefetcher() = default;

    PagePrefetcher(const KvCache& cache, const int32_t* pages, int64_t count, int64_t head, bool to_l1)
        : to_l1_(to_l1), streams_(2 * count), left_(PAGE * cache.head_dim * sizeof(bf16) / (LINES * CACHE_LINE)) {
        for (int64_t n = 0; n < count; n++) {
            at_[2 * n] = reinterpret_cast<const char*>(keys(cache, pages[n], head));
            at_[2 * n + 1] = reinterpret_cast<const char*>(values(cache, pages[n], head));
        }
    }

    // Prefetches a part. A product calls this for every 32 x 32 elements, so that all products of a block prefetch all
    // of the next block.
    void prefetch_part() {
        if (left_ == 0) return;
        left_--;
        for (int64_t n = 0; n < streams_; n++)
            for (int64_t line = 0; line < LINES; line++, at_[n] += CACHE_LINE) {
                if (to_l1_) _mm_prefetch(at_[n], _MM_HINT_T0);
                else _mm_prefetch(at_[n], _MM_HINT_T1);
            }
    }

    void prefetch_all() {
        while (left_) prefetch_part();
    }

  private:
    static constexpr int64_t LINES = 8;  // of each stream at once
    const char* at_[4];
    bool to_l1_ = false;
    int64_t streams_ = 0, left_ = 0;
};

// The keys of a page, as columns of `tile_matmul`.
struct KeyBlocks {
    const bf16* next_block() {
        prefetcher.prefetch_part();
        const bf16* found = at;
        at += 32 * PAGE;
        return found;
    }

    const bf16* at;
    PagePrefetcher& prefetcher;
    int64_t step = 2 * PAGE, right = 32;
};

// 32 columns of the values of two pages, as columns of `tile_matmul`.
struct ValueBlocks {
    const bf16* next_block() {
        prefetcher.prefetch_part();
        return pages[next++];
    }

    const bf16* pages[2];
    int64_t step;
    PagePrefetcher& prefetcher;
    int64_t right = 32, next = 0;
};

constexpr int64_t MAX_HEAD_DIM = 256;

// Some rows of one KV head, and the positions that they see.
struct TileRange {
    int64_t row, head, begin, rows, lowest, end;
};

// The buffers of a thread for one tile.
struct TileWorkspace {
    alignas(64) bf16 queries[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[TILE_ROWS][BLOCK];
    alignas(64) bf16 weights[TILE_ROWS][BLOCK];
    int64_t positions[TILE_ROWS];  // of the rows' tokens
    alignas(64) float part[PartialAttention::size(MAX_HEAD_DIM)];
    alignas(64) float total[PartialAttention::size(MAX_HEAD_DIM)];
};

inline TileWorkspace& tile_workspace() {
    static thread_local TileWorkspace one;
    return one;
}

// Computes the rows of a range over its positions. `writes_kv`: the range is a single token whose key and value are not
// in the cache yet.
class AttentionTile {
  public:
    AttentionTile(const KvCache& cache, const AttentionBatch& batch, const AttentionCall& call, const TileRange& at,
        bool writes_kv)
        : cache(cache), batch(batch), call(call), at(at), writes_kv(writes_kv), dim(cache.head_dim),
          heads_per_kv(cache.heads / cache.kv_heads),
          softmax{call.softcap ? LOG2_E : call.scale * LOG2_E}, workspace(tile_workspace()) {}

    // Copies the queries; to be called first.
    void begin() const {
        const int64_t stride = (cache.heads + 2 * cache.kv_heads) * dim;
        prefetcher(at.lowest / BLOCK * BLOCK).prefetch_all();
        configure_tiles(at.rows);
        for_each_row([&](int64_t r, int64_t token, int64_t head) {
            memcpy(workspace.queries + r * dim, call.qkv + token * stride + head * dim, dim * sizeof(bf16));
            workspace.positions[r] = batch.context_lengths[at.row] - batch.bounds[at.row + 1] + token;
        });
    }

    // Computes the attention over positions `from` to `end`.
    void compute(int64_t from, int64_t end, const PartialAttention& part) const {
        part.clear(at.rows, dim);
        end = std::min(end, at.end);
        for (from = std::max(from, at.lowest / BLOCK * BLOCK); from < end; from += BLOCK) block(from, part);
    }

    // Divides by the sums and stores the result.
    void store_result(const PartialAttention& total) const {
        for_each_row([&](int64_t r, int64_t token, int64_t head) {
            bf16* to = call.y + (token * cache.heads + head) * dim;
            const float* values = total.values + r * dim;
            const __m512 reciprocal_sum = _mm512_set1_ps(1.f / _mm512_reduce_add_ps(_mm512_load_ps(total.sums +
                r * LANES)));
            for (int64_t d = 0; d < dim; d += 16) store(to + d, _mm512_mul_ps(_mm512_load_ps(values + d),
                reciprocal_sum));
        });
    }

  private:
    // Calls `use` with each row, its token and its query head.
    template <class Use>
    void for_each_row(Use use) const {
        int64_t token = batch.bounds[at.row] + at.begin / heads_per_kv, head = at.begin % heads_per_kv;
        for (int64_t r = 0; r < at.rows; r++) {
            use(r, token, at.head * heads_per_kv + head);
            if (++head == heads_per_kv) head = 0, token++;
        }
    }

    void block(int64_t from, const PartialAttention& part) const {
        // Only after the page has been prefetched: a write to uncached memory takes long.
        if (writes_kv && from + BLOCK >= batch.context_lengths[at.row]) write_kv(cache, batch, call.qkv,
            batch.bounds[at.row], at.head);
        const int64_t count = page_count(from);
        const int32_t* pages = pages_at(from);
        PagePrefetcher next = from + BLOCK < at.end ? prefetcher(from + BLOCK) : PagePrefetcher();
        for (int64_t n = 0; n < count; n++)
            tile_matmul(workspace.queries, dim, at.rows, KeyBlocks{keys(cache, pages[n], at.head), next}, dim,
                workspace.scores[0] + n * PAGE,
                    BLOCK);
        for (int64_t r = 0; r < at.rows; r += LANES) update_maxima(r, std::min(r + LANES, at.rows), from, part);
        const ApproximateExp2 exp2;
        for (int64_t r = 0; r < at.rows; r++)
            softmax.exponentiate(workspace.scores[r], workspace.weights[r], part.highest[r], part.sums + r * LANES,
                exp2);
        const bf16* at_first = values(cache, pages[0], at.head);
        const bf16* at_second = values(cache, pages[count - 1], at.head);
        for (int64_t d = 0; d < dim; d += COLUMNS)
            tile_matmul<true>(workspace.weights[0], BLOCK, at.rows, ValueBlocks{{at_first + 2 * d, at_second + 2 * d},
                2 * dim, next},
                          count * PAGE, part.values + d, dim);
    }

    // The pages of a block, and how many of them it needs.
    const int32_t* pages_at(int64_t from) const { return batch.pages + at.row * batch.width + from / PAGE; }
    int64_t page_count(int64_t from) const { return at.end - from > PAGE ? 2 : 1; }

    // With many rows, two blocks do not fit the L1 cache.
    PagePrefetcher prefetcher(int64_t from) const { return {cache, pages_at(from), page_count(from), at.head,
        at.rows <= LANES}; }

    // Updates the maxima of up to 16 rows with the scores of a block, and rescales the rows whose maximum has grown.
    void update_maxima(int64_t first, int64_t last, int64_t from, const PartialAttention& part) const {
        __m512 maxima_of_lanes[LANES];
        for (int64_t r = first; r < first + LANES; r++) maxima_of_lanes[r - first] = _mm512_set1_ps(MINUS_INFINITY);
        for (int64_t r = first; r < last; r++) {
            if (call.softcap) softmax.softcap_scores(workspace.scores[r], call.scale, call.softcap);
            if (const uint64_t visible =
                visible_positions(workspace.positions[r] - from); ~visible) softmax.mask(workspace.scores[r], visible);
            maxima_of_lanes[r - first] = softmax.lane_maxima(workspace.scores[r]);
        }
        const __m512 highest = _mm512_load_ps(part.highest + first);
        const __m512 next = _mm512_max_ps(highest, _mm512_mul_ps(horizontal_maxima(maxima_of_lanes),
            _mm512_set1_ps(softmax.unit)));
        alignas(64) float raised[LANES], factors[LANES];
        _mm512_store_ps(raised, next);
        _mm512_store_ps(factors, exp2(_mm512_sub_ps(highest, next)));
        const uint32_t higher = _mm512_mask_cmplt_ps_mask((1u << (last - first)) - 1, highest, next);
        for (uint32_t left = higher; left; left &= left - 1) {
            const int n = __builtin_ctz(left);
            rescale(part, first + n, raised[n], factors[n]);
        }
    }

    // Rescales the sums of a row to a new maximum.
    void rescale(const PartialAttention& part, int64_t r, float highest, float factor) const {
        const float before = part.highest[r];
        part.highest[r] = highest;
        if (before == MINUS_INFINITY) return;  // no sums yet
        const __m512 less = _mm512_set1_ps(factor);
        for (float* to = part.values + r * dim; to < part.values + (r + 1) * dim; to += LANES)
            _mm512_store_ps(to, _mm512_mul_ps(_mm512_load_ps(to), less));
        _mm512_store_ps(part.sums + r * LANES, _mm512_mul_ps(_mm512_load_ps(part.sums + r * LANES), less));
    }

    // A mask of the positions of a block that are visible to position `last`, counted from the start of the block.
    uint64_t visible_positions(int64_t last) const {
        if (last < 0) return 0;
        const uint64_t upper = last < BLOCK - 1 ? (uint64_t(2) << last) - 1 : ~uint64_t(0);
        const int64_t hidden = call.window ? last - call.window + 1 : 0;
        if (hidden >= BLOCK) return 0;
        return hidden > 0 ? upper >> hidden << hidden : upper;
    }

    const KvCache& cache;
    const AttentionBatch& batch;
    const AttentionCall& call;
    const TileRange at;
    const bool writes_kv;
    const int64_t dim, heads_per_kv;
    const Softmax softmax;
    TileWorkspace& workspace;
};

}  // namespace tgi
