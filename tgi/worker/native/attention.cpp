// Attention over paged keys and values, in tiles of 16 rows: a row is one query head of one token.
//
// A tile has the query heads of one KV head, of as many consecutive tokens of a row as fit. It goes over the keys in
// blocks of 64 positions, from a multiple of 64 on, and keeps a running maximum and sum for each of its rows (Milakov and
// Gimelshein, 2018; Dao et al., 2022). What a query must not see counts as -infinity and adds exact zeros, so its result
// depends neither on the other rows of its tile nor on how many keys follow: prefill, decode and every division of a
// prompt into chunks agree bit for bit.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "product.h"

namespace tgi {
namespace {

constexpr int64_t PAGE = 32;   // positions of a page
constexpr int64_t BLOCK = 64;  // positions that are computed together
constexpr int64_t TILE = 16;   // rows
constexpr int64_t WIDEST = 256;  // head_dim
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline bf16* keys(const Cache& cache, int64_t page, int64_t head) {
    return cache.at + (page * cache.kv_heads + head) * 2 * PAGE * cache.head_dim;
}

inline bf16* values(const Cache& cache, int64_t page, int64_t head) {
    return keys(cache, page, head) + PAGE * cache.head_dim;
}

struct PlaceJob final : Job {
    PlaceJob(const Cache& cache, const Step& step, const bf16* qkv) : cache(cache), step(step), qkv(qkv) {}

    void run(int64_t chunk) const override {
        const int64_t first = chunk * SHARE, last = std::min(first + SHARE, step.bounds[step.rows]);
        for (int64_t token = first; token < last; token++) one(token);
    }

    void one(int64_t token) const {
        const int64_t dim = cache.head_dim, heads = cache.heads + cache.kv_heads;
        const bf16* row = qkv + token * (heads + cache.kv_heads) * dim;
        const int64_t page = step.places[token] / PAGE, at = step.places[token] % PAGE;
        for (int64_t head = 0; head < cache.kv_heads; head++) {
            const bf16 *key = row + (cache.heads + head) * dim, *value = row + (heads + head) * dim;
            bf16 *to = keys(cache, page, head) + 2 * at, *into = values(cache, page, head) + at / 2 * 2 * dim + at % 2;
            for (int64_t d = 0; d < dim; d += 2) memcpy(to + d * PAGE, key + d, 4);
            // An overflow in one request must not reach the next owner of its pages, who multiplies it with zero.
            for (int64_t d = 0; d < dim; d++) into[2 * d] = (value[d] & 0x7f80) == 0x7f80 ? 0 : value[d];
        }
    }

    static constexpr int64_t SHARE = 8;  // tokens of a chunk
    const Cache& cache;
    const Step& step;
    const bf16* qkv;
};

// Some rows of one KV head, on their way over the keys.
struct Tile {
    alignas(64) bf16 queries[TILE][WIDEST];
    alignas(64) float found[TILE][WIDEST];
    alignas(64) float scores[TILE][BLOCK];
    alignas(64) bf16 shares[TILE][BLOCK];
    float highest[TILE], sum[TILE];
    int64_t position[TILE];
};

struct AttendJob final : Job {
    AttendJob(const Cache& cache, const Step& step, const Attention& call)
        : cache(cache), step(step), call(call), group(cache.heads / cache.kv_heads) {
        first.reserve(step.rows + 1);
        first.push_back(0);
        for (int64_t row = 0; row < step.rows; row++) {
            const int64_t rows = (step.bounds[row + 1] - step.bounds[row]) * group;
            first.push_back(first.back() + (rows + TILE - 1) / TILE);
        }
    }

    int64_t chunks() const { return first.back() * cache.kv_heads; }

    void run(int64_t chunk) const override {
        // Tiles of one head together: rows that share a prefix find its pages in the core's cache.
        const int64_t head = chunk / first.back(), tile = chunk % first.back();
        const int64_t row = std::upper_bound(first.begin(), first.end(), tile) - first.begin() - 1;
        compute(row, (tile - first[row]) * TILE, head);
    }

    void compute(int64_t row, int64_t begin, int64_t head) const {
        const int64_t dim = cache.head_dim, token = step.bounds[row], count = step.bounds[row + 1] - token;
        const int64_t rows = std::min(count * group - begin, TILE), stride = (cache.heads + 2 * cache.kv_heads) * dim;
        static thread_local Tile tile;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t query = (begin + r) / group, of = head * group + (begin + r) % group;
            memcpy(tile.queries[r], call.qkv + (token + query) * stride + of * dim, dim * sizeof(bf16));
            memset(tile.found[r], 0, dim * sizeof(float));
            tile.highest[r] = NEVER;
            tile.sum[r] = 0;
            tile.position[r] = step.contexts[row] - count + query;
        }
        const int64_t lowest = call.window ? std::max<int64_t>(0, tile.position[0] - call.window + 1) : 0;
        const int64_t end = tile.position[rows - 1] + 1;
        const int32_t* pages = step.pages + row * step.width;
        prepare(rows);
        for (int64_t from = lowest / BLOCK * BLOCK; from < end; from += BLOCK) block(tile, rows, pages, from, end, head);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t query = (begin + r) / group, of = head * group + (begin + r) % group;
            bf16* to = call.y + ((token + query) * cache.heads + of) * dim;
            const __m512 share = _mm512_set1_ps(1.f / tile.sum[r]);
            for (int64_t d = 0; d < dim; d += 16) store(to + d, _mm512_mul_ps(_mm512_load_ps(tile.found[r] + d), share));
        }
    }

    // The positions from `from` on, those before `end`.
    void block(Tile& tile, int64_t rows, const int32_t* pages, int64_t from, int64_t end, int64_t head) const {
        const int64_t dim = cache.head_dim, blocks = end - from > PAGE ? 2 : 1;
        for (int64_t n = 0; n < blocks; n++)
            product(tile.queries[0], WIDEST, rows, keys(cache, pages[from / PAGE + n], head), PAGE, dim,
                    tile.scores[0] + n * PAGE, BLOCK);
        for (int64_t r = 0; r < rows; r++) weigh(tile, r, from, blocks * PAGE);
        for (int64_t n = 0; n < blocks; n++)
            for (int64_t d = 0; d < dim; d += COLUMNS)
                product<true>(tile.shares[0] + n * PAGE, BLOCK, rows, values(cache, pages[from / PAGE + n], head) + 2 * d, dim,
                              PAGE, tile.found[0] + d, WIDEST);
    }

    // Turns a row's scores into its shares of the values, and fits what it has found so far to the new maximum.
    void weigh(Tile& tile, int64_t r, int64_t from, int64_t count) const {
        float* scores = tile.scores[r];
        const __m512 scale = _mm512_set1_ps(call.scale), never = _mm512_set1_ps(NEVER);
        const __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const int64_t last = tile.position[r] - from;  // the last one that the row sees
        const __m512i upper = _mm512_set1_epi32((int)std::clamp<int64_t>(last, -1, BLOCK));
        const int64_t first = call.window ? last - call.window + 1 : 0;
        const __m512i lower = _mm512_set1_epi32((int)std::clamp<int64_t>(first, 0, BLOCK));
        __m512 most = never;
        for (int64_t at = 0; at < count; at += 16) {
            const __m512i place = _mm512_add_epi32(ids, _mm512_set1_epi32((int)at));
            const __mmask16 sees = _mm512_cmple_epi32_mask(place, upper) & _mm512_cmpge_epi32_mask(place, lower);
            __m512 score = _mm512_mul_ps(_mm512_load_ps(scores + at), scale);
            if (call.softcap) score = capped(score);
            score = _mm512_mask_blend_ps(sees, never, score);
            _mm512_store_ps(scores + at, score);
            most = _mm512_max_ps(most, score);
        }
        const float highest = std::max(tile.highest[r], _mm512_reduce_max_ps(most));
        if (highest == NEVER) {  // it sees nothing of this block and saw nothing before
            memset(tile.shares[r], 0, sizeof tile.shares[r]);
            return;
        }
        const __m512 top = _mm512_set1_ps(highest);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t at = 0; at < count; at += 16) {
            const __m512 share = exp(_mm512_sub_ps(_mm512_load_ps(scores + at), top));
            sum = _mm512_add_ps(sum, share);
            store(tile.shares[r] + at, share);
        }
        if (highest != tile.highest[r]) {
            const float less = std::exp(tile.highest[r] - highest);
            for (int64_t d = 0; d < cache.head_dim; d += 16)
                _mm512_store_ps(tile.found[r] + d, _mm512_mul_ps(_mm512_load_ps(tile.found[r] + d), _mm512_set1_ps(less)));
            tile.sum[r] *= less;
            tile.highest[r] = highest;
        }
        tile.sum[r] += _mm512_reduce_add_ps(sum);
    }

    __m512 capped(__m512 score) const {
        // tanh(u) = 2 sigmoid(2 u) - 1
        const __m512 cap = _mm512_set1_ps(call.softcap), two = _mm512_set1_ps(2.f);
        const __m512 inner = _mm512_mul_ps(_mm512_div_ps(score, cap), two);
        return _mm512_mul_ps(cap, _mm512_fmsub_ps(two, sigmoid(inner), _mm512_set1_ps(1.f)));
    }

    const Cache& cache;
    const Step& step;
    const Attention& call;
    const int64_t group;
    std::vector<int64_t> first;  // [rows + 1] tiles before each row
};

}  // namespace

void attend(Team& team, const Cache& cache, const Step& step, const Attention& call) {
    team.run(PlaceJob(cache, step, call.qkv), (step.bounds[step.rows] + PlaceJob::SHARE - 1) / PlaceJob::SHARE);
    const AttendJob job(cache, step, call);
    team.run(job, job.chunks());
}

}  // namespace tgi
