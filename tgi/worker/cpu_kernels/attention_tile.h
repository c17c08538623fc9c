// Attention of one tile of rows: scores, online softmax and the weighted sum of the values. See attention.cpp.
#pragma once
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "kv_cache.h"
#include "online_softmax.h"
#include "engine.h"
#include "prefetch.h"

namespace tgi {

// Prefetches the keys and values of one head in one or two pages while the block before is computed.
//
// Pages may be anywhere, and the hardware prefetcher stays within 4 KB, so the start of each page would stall. It
// follows several streams at once, which together get more memory bandwidth than one after the other: so the keys and
// values of both pages are prefetched in alternation. `to_l1`: into the L1 cache, else into the L2 cache. `passes`: how
// often the products of a block go over its keys and values.
template <class T>
class PagePrefetcher {
  public:
    PagePrefetcher() = default;

    PagePrefetcher(const KvCache& cache, const int32_t* pages, int64_t count, int64_t head, bool to_l1,
        int64_t passes)
        : to_l1_(to_l1), streams_(cache.parts() * count),
          lines_(std::max<int64_t>(LINES * 2 / cache.parts() / passes, 1)),
          left_(PAGE * cache.padded_dim() * sizeof(T) / (lines_ * CACHE_LINE)) {
        for (int64_t n = 0; n < count; n++) {
            at_[cache.parts() * n] = reinterpret_cast<const char*>(keys<T>(cache, pages[n], head));
            if (cache.parts() > 1) at_[2 * n + 1] = reinterpret_cast<const char*>(values<T>(cache, pages[n], head));
            if constexpr (std::is_same_v<T, int8_t>)
                for (int64_t at = 0; at < cache.parts() * PAGE; at += 16)
                    __builtin_prefetch(kv_scales(cache, pages[n], head) + at);
        }
    }

    // Prefetches a part. A product calls this for every 32 x 32 elements, so that all products of a block prefetch all
    // of the next block.
    void prefetch_part() {
        if (left_ == 0) return;
        left_--;
        for (int64_t n = 0; n < streams_; n++)
            for (int64_t line = 0; line < lines_; line++, at_[n] += CACHE_LINE) {
                if (to_l1_) __builtin_prefetch(at_[n], 0, 3);
                else __builtin_prefetch(at_[n], 0, 2);
            }
    }

    void prefetch_all() {
        while (left_) prefetch_part();
    }

  private:
    static constexpr int64_t LINES = 4 * sizeof(T);  // of each stream for 32 x 32 elements
    const char* at_[4];
    bool to_l1_ = false;
    int64_t streams_ = 0, lines_ = 0, left_ = 0;
};

// 32 keys of a page, as columns of a product.
template <class T>
struct KeyBlocks {
    const T* next_block() {
        prefetcher.prefetch_part();
        return next_unprefetched();
    }

    const T* next_unprefetched() {
        const T* found = at;
        at += 32 * PAGE;
        return found;
    }

    const T* at;
    PagePrefetcher<T>& prefetcher;
    static constexpr int64_t step = 2 * PAGE, right = IS_PAIRED<T> ? 32 : 16;
};

// 32 columns of the values of two pages, as columns of a product.
template <class T>
struct ValueBlocks {
    const T* next_block() {
        prefetcher.prefetch_part();
        return next_unprefetched();
    }

    const T* next_unprefetched() { return pages[next++]; }

    const T* pages[2];
    int64_t step;
    PagePrefetcher<T>& prefetcher;
    int64_t next = 0;
    static constexpr int64_t right = IS_PAIRED<T> ? 32 : 16;
};

// 32 columns alone, converted to the type that the engine multiplies.
template <class T>
struct ConvertedBlocks {
    const Operand* next_block() {
        prefetcher.prefetch_part();
        const Operand* found = at;
        at += 32 * 32;
        return found;
    }

    const Operand* at;
    PagePrefetcher<T>& prefetcher;
    static constexpr int64_t step = 64, right = IS_PAIRED<Operand> ? 32 : 16;
};

#if TGI_DOT_ENGINE
// Numbers that bfloat16 has exactly.
TGI_INLINE void store_pair(bf16* at, const Float (&pair)[2]) {
    const Int words = shift_right(as_int(pair[0]), 16) | (as_int(pair[1]) & broadcast(int32_t(0xffff0000)));
    store((int32_t*)at, words);
}
#else
TGI_INLINE void store_pair(float* at, const Float (&pair)[2]) { store(at, pair[0]), store(at + 32, pair[1]); }
#endif

// Converts all inputs of 32 columns.
template <class T, template <class> class Blocks>
inline ConvertedBlocks<T> convert_columns(Blocks<T> blocks, int64_t depth, Operand* to) {
    for (int64_t k = 0; k < depth; k += 32) {
        const T* at = blocks.next_unprefetched();
        for (int64_t pair = 0; pair < 16; pair++)
            for (int64_t half = 0; half < 2; half++) {
                const T* from = at + pair * blocks.step + half * blocks.right;
                const Float columns[] = {load_input<0>(from, blocks.step / 2), load_input<1>(from, blocks.step / 2)};
                store_pair(to + (k / 2 + pair) * 64 + half * ConvertedBlocks<T>::right, columns);
            }
    }
    return {to, blocks.prefetcher};
}

// Numbers d to d + 31 of the keys of a block as 32 columns of values.
template <class T>
inline ConvertedBlocks<T> transpose_keys(const T* const (&pages)[2], int64_t count, int64_t d, Operand* to,
    PagePrefetcher<T>& prefetcher) {
    for (int64_t at = 0; at < count * PAGE; at += LANES)
        for (int64_t half = 0; half < 2; half++) {
            const T* from = pages[at / PAGE] + element_index<T>(d + half * LANES, at % PAGE, PAGE);
            Float numbers[LANES];  // of a position each, once they are transposed
            for (int64_t pair = 0; pair < LANES / 2; pair++, from += 2 * PAGE) {
                numbers[2 * pair] = load_input<0>(from, PAGE);
                numbers[2 * pair + 1] = load_input<1>(from, PAGE);
            }
            transpose(numbers);
            for (int64_t pair = 0; pair < LANES / 2; pair++)
                store_pair(to + (at / 2 + pair) * 64 + half * ConvertedBlocks<T>::right,
                    {numbers[2 * pair], numbers[2 * pair + 1]});
        }
    return {to, prefetcher};
}

// Some rows of one KV head, and the positions that they see.
struct TileRange {
    int64_t row, head, begin, rows, lowest, end;
};

// The buffers of a thread for one tile.
struct TileWorkspace {
    alignas(64) Operand queries[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[TILE_ROWS][BLOCK];
#if TGI_DOT_ENGINE
    alignas(64) Operand weights[TILE_ROWS][BLOCK];
#else
    Operand (&weights)[TILE_ROWS][BLOCK] = scores;
#endif
    alignas(64) Operand columns[MAX_HEAD_DIM * 32];  // a converted panel
    int64_t positions[TILE_ROWS], last_seen[TILE_ROWS];  // of the rows' tokens
    float slopes[TILE_ROWS];  // of the rows' heads
    alignas(64) float part[PartialAttention::size(MAX_HEAD_DIM)];
    alignas(64) float total[PartialAttention::size(MAX_HEAD_DIM)];
};

inline TileWorkspace& tile_workspace() {
    static thread_local TileWorkspace one;
    return one;
}

// Computes the rows of a range over its positions. `writes_kv`: the range is a single token whose key and value are not
// in the cache yet.
template <class T>
class AttentionTile {
  public:
    AttentionTile(const KvCache& cache, const AttentionBatch& batch, const AttentionCall& call, const TileRange& at,
        bool writes_kv)
        : cache(cache), batch(batch), call(call), at(at), writes_kv(writes_kv), dim(cache.padded_dim()),
          value_dim(padded_to_32(cache.result_dim())), heads_per_kv(cache.heads / cache.kv_heads),
          softmax{call.softcap || call.slopes ? LOG2_E : call.scale * LOG2_E}, workspace(tile_workspace()) {}

    // Copies the queries; to be called first.
    void begin() const {
        const int64_t size = cache.head_dim, stride = cache.row_size();
        prefetcher(at.lowest / BLOCK * BLOCK).prefetch_all();
#if TGI_DOT_ENGINE
        configure_tiles(at.rows);
#endif
        for_each_row([&](int64_t r, int64_t token, int64_t head) {
            const Element* query = call.qkv + token * stride + head * size;
            for (int64_t d = 0; d < dim; d += LANES)
                store(workspace.queries + r * dim + d, load_first(query + d, std::max<int64_t>(size - d, 0)));
            workspace.positions[r] = batch.context_lengths[at.row] - batch.bounds[at.row + 1] + token;
            workspace.last_seen[r] = call.last_seen(batch, token, workspace.positions[r]);
            workspace.slopes[r] = call.slopes ? call.slopes[head] : 0;
        });
    }

    // Computes the attention over positions `from` to `end`.
    void compute(int64_t from, int64_t end, const PartialAttention& part) const {
        part.clear(at.rows, value_dim);
        end = std::min(end, at.end);
        for (from = std::max(from, at.lowest / BLOCK * BLOCK); from < end; from += BLOCK) block(from, part);
    }

    // Clears the sums over all positions, which begin with the sinks.
    void start_total(const PartialAttention& total) const {
        total.clear(at.rows, value_dim);
        if (!call.sinks) return;
        for_each_row([&](int64_t r, int64_t, int64_t head) {
            total.highest[r] = call.sinks[head] * LOG2_E;
            total.sums[r * LANES] = 1;
        });
    }

    // Divides by the sums and stores the result.
    void store_result(const PartialAttention& total) const {
        for_each_row([&](int64_t r, int64_t token, int64_t head) {
            const int64_t size = cache.result_dim();
            Element* to = call.y + (token * cache.heads + head) * size;
            const float* values = total.values + r * value_dim;
            const Float reciprocal_sum = broadcast(1.f / reduce_add(load(total.sums + r * LANES)));
            for (int64_t d = 0; d < size; d += LANES)
                store_first(to + d, load(values + d) * reciprocal_sum, size - d);
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
        if (writes_kv && from + BLOCK >= batch.context_lengths[at.row]) write_kv<T>(cache, batch, call.qkv,
            batch.bounds[at.row], at.head);
        const int64_t count = page_count(from);
        const int32_t* pages = pages_at(from);
        PagePrefetcher<T> next = from + BLOCK < at.end ? prefetcher(from + BLOCK) : PagePrefetcher<T>();
        for (int64_t n = 0; n < count; n++)
            multiply(workspace.queries, dim, KeyBlocks<T>{keys<T>(cache, pages[n], at.head), next}, dim,
                workspace.scores[0] + n * PAGE, BLOCK);
        const float* key_scales[2] = {};
        const float* value_scales[2] = {};
        if constexpr (SCALED)
            for (int64_t n = 0; n < 2; n++) {
                key_scales[n] = kv_scales(cache, pages[std::min(n, count - 1)], at.head);
                value_scales[n] = key_scales[n] + (cache.parts() - 1) * PAGE;
            }
        for (int64_t r = 0; r < at.rows; r += LANES)
            update_maxima(r, std::min(r + LANES, at.rows), from, key_scales, part);
        const WeightExp2 exp2;
        for (int64_t r = 0; r < at.rows; r++)
            softmax.template exponentiate<SCALED>(workspace.scores[r], workspace.weights[r], part.highest[r],
                part.sums + r * LANES, exp2, value_scales);
        if (cache.value_dim) {
            const T* const columns[] = {keys<T>(cache, pages[0], at.head), keys<T>(cache, pages[count - 1], at.head)};
            for (int64_t d = 0; d < value_dim; d += 32)
                tile_matmul<true>(workspace.weights[0], BLOCK, at.rows,
                    transpose_keys(columns, count, d, workspace.columns, next), count * PAGE, part.values + d,
                    value_dim);
            return;
        }
        const T* at_first = values<T>(cache, pages[0], at.head);
        const T* at_second = values<T>(cache, pages[count - 1], at.head);
        constexpr int64_t column = IS_PAIRED<T> ? 2 : 1;  // elements from one column to the next
        for (int64_t d = 0; d < dim; d += 32)
            multiply<true>(workspace.weights[0], BLOCK,
                ValueBlocks<T>{{at_first + column * d, at_second + column * d}, 2 * dim, next}, count * PAGE,
                part.values + d, dim);
    }

    // A product of the tile's rows. Columns that the engine does not multiply as they are stored, or that several
    // groups of rows would widen again, are converted first.
    template <bool add = false, class B>
    void multiply(const Operand* a, int64_t a_step, B&& blocks, int64_t depth, float* c, int64_t c_step) const {
        if constexpr (!std::is_same_v<T, Operand>)
            if (TGI_DOT_ENGINE || at.rows > UNCONVERTED_ROWS) {
                auto converted = convert_columns(blocks, depth, workspace.columns);
                return tile_matmul<add>(a, a_step, at.rows, converted, depth, c, c_step);
            }
        if constexpr (std::is_same_v<T, Operand> || !TGI_DOT_ENGINE)
            tile_matmul<add>(a, a_step, at.rows, blocks, depth, c, c_step);
    }

    // The pages of a block, and how many of them it needs.
    const int32_t* pages_at(int64_t from) const { return batch.pages + at.row * batch.width + from / PAGE; }
    int64_t page_count(int64_t from) const { return at.end - from > PAGE ? 2 : 1; }

    // With many rows, two blocks do not fit the L1 cache.
    PagePrefetcher<T> prefetcher(int64_t from) const { return {cache, pages_at(from), page_count(from), at.head,
        at.rows <= LANES, passes()}; }

    // How often a product of the tile's rows goes over its columns.
    int64_t passes() const {
#if TGI_DOT_ENGINE
        return 1;
#else
        return at.rows <= WIDE_FMA_ROWS ? 1 : (at.rows + FMA_ROWS - 1) / FMA_ROWS * (WIDE_FMA_ROWS < FMA_ROWS ? 2 : 1);
#endif
    }

    // Updates the maxima of up to 16 rows with the scores of a block, and rescales the rows whose maximum has grown.
    void update_maxima(int64_t first, int64_t last, int64_t from, const float* const (&scales)[2],
        const PartialAttention& part) const {
        Float maxima_of_lanes[LANES];
        for (int64_t r = first; r < first + LANES; r++) maxima_of_lanes[r - first] = broadcast(MINUS_INFINITY);
        for (int64_t r = first; r < last; r++) {
            if (SCALED) softmax.scale_scores(workspace.scores[r], scales);
            if (call.softcap) softmax.softcap_scores(workspace.scores[r], call.scale, call.softcap);
            if (call.slopes) softmax.bias_scores(workspace.scores[r], call.scale, workspace.slopes[r],
                from - workspace.positions[r]);
            const uint64_t visible =
                visible_positions(r, from, batch.context_lengths[at.row]);
            if (~visible) softmax.mask(workspace.scores[r], visible);
            maxima_of_lanes[r - first] = softmax.lane_maxima(workspace.scores[r]);
        }
        const Float highest = load(part.highest + first);
        const Float next = max(highest, horizontal_maxima(maxima_of_lanes) * broadcast(softmax.unit));
        alignas(64) float raised[LANES], factors[LANES];
        store(raised, next), store(factors, exp2(highest - next));
        const uint32_t higher = bits_of(next > highest) & ((1u << (last - first)) - 1);
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
        const Float less = broadcast(factor);
        for (float* to = part.values + r * value_dim; to < part.values + (r + 1) * value_dim; to += LANES)
            store(to, load(to) * less);
        store(part.sums + r * LANES, load(part.sums + r * LANES) * less);
    }

    // A mask of the positions of the block from `from` on that are visible to row r in a context of `end`.
    uint64_t visible_positions(int64_t r, int64_t from, int64_t end) const {
        const int64_t last = std::min(workspace.last_seen[r], end - 1) - from;
        if (last < 0) return 0;
        const uint64_t upper = last < BLOCK - 1 ? (uint64_t(2) << last) - 1 : ~uint64_t(0);
        const int64_t hidden = call.first_seen(workspace.positions[r]) - from;
        if (hidden >= BLOCK) return 0;
        return hidden > 0 ? upper >> hidden << hidden : upper;
    }

    static constexpr bool SCALED = std::is_same_v<T, int8_t>;
    static constexpr int64_t UNCONVERTED_ROWS = 6;  // up to this many rows multiply columns as they are stored

    const KvCache& cache;
    const AttentionBatch& batch;
    const AttentionCall& call;
    const TileRange at;
    const bool writes_kv;
    const int64_t dim, value_dim, heads_per_kv;  // dim, value_dim: padded
    const Softmax softmax;
    TileWorkspace& workspace;
};

}  // namespace tgi
