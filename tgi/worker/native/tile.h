// What the rows of a tile find: scores, their softmax as it goes, and the sum of the values. See attention.cpp.
#pragma once
#include <algorithm>
#include <cstring>

#include "ahead.h"
#include "attention.h"
#include "found.h"
#include "product.h"

namespace tgi {

constexpr int64_t BLOCK = 64;    // positions that are computed together
constexpr int64_t WIDEST = 256;  // head_dim
constexpr float LOG2_E = 1.44269504f;

// Some rows of one KV head, and the positions that they see.
struct Range {
    int64_t row, head, begin, rows, lowest, end;
};

// What one thread needs to compute a tile.
struct Desk {
    alignas(64) bf16 queries[TILE * WIDEST];
    alignas(64) float scores[TILE][BLOCK];
    alignas(64) bf16 shares[TILE][BLOCK];
    int64_t positions[TILE];  // of the rows' tokens
    alignas(64) float part[Found::size(WIDEST)];
    alignas(64) float whole[Found::size(WIDEST)];
};

inline Desk& desk() {
    static thread_local Desk one;
    return one;
}

// The rows of a range, on their way over its positions. `placing`: of a token alone, whose key and value are not in the
// cache yet.
class Tile {
  public:
    Tile(const Cache& cache, const Step& step, const Attention& call, const Range& at, bool placing)
        : cache(cache), step(step), call(call), at(at), placing(placing), dim(cache.head_dim),
          group(cache.heads / cache.kv_heads), my(desk()) {}

    // Before anything is computed.
    void begin() const {
        const int64_t stride = (cache.heads + 2 * cache.kv_heads) * dim;
        ahead(at.lowest / BLOCK * BLOCK).ask_all();
        prepare(at.rows);
        for (int64_t r = 0; r < at.rows; r++) {
            memcpy(my.queries + r * dim, call.qkv + token(r) * stride + head(r) * dim, dim * sizeof(bf16));
            my.positions[r] = step.contexts[at.row] - step.bounds[at.row + 1] + token(r);
        }
    }

    // What they find from the position `from` up to `end`.
    void compute(int64_t from, int64_t end, const Found& part) const {
        part.clear(at.rows, dim);
        end = std::min(end, at.end);
        for (from = std::max(from, at.lowest / BLOCK * BLOCK); from < end; from += BLOCK) block(from, part);
    }

    // Writes down what they have found in all.
    void finish(const Found& whole) const {
        for (int64_t r = 0; r < at.rows; r++) {
            bf16* to = call.y + (token(r) * cache.heads + head(r)) * dim;
            const float* values = whole.values + r * dim;
            const __m512 share = _mm512_set1_ps(1.f / _mm512_reduce_add_ps(_mm512_load_ps(whole.sums + r * LANES)));
            for (int64_t d = 0; d < dim; d += 16) store(to + d, _mm512_mul_ps(_mm512_load_ps(values + d), share));
        }
    }

  private:
    int64_t token(int64_t r) const { return step.bounds[at.row] + (at.begin + r) / group; }
    int64_t head(int64_t r) const { return at.head * group + (at.begin + r) % group; }

    void block(int64_t from, const Found& part) const {
        // Not before the page has been asked for: to write to what is in no cache takes long.
        if (placing && from + BLOCK >= step.contexts[at.row]) place(cache, step, call.qkv, step.bounds[at.row], at.head);
        const int64_t count = pages_of(from);
        const int32_t* pages = pages_at(from);
        Ahead next = from + BLOCK < at.end ? ahead(from + BLOCK) : Ahead();
        for (int64_t n = 0; n < count; n++)
            product(my.queries, dim, at.rows, Keys{keys(cache, pages[n], at.head), next}, dim, my.scores[0] + n * PAGE,
                    BLOCK);
        for (int64_t r = 0; r < at.rows; r += LANES) fit(r, std::min(r + LANES, at.rows), from, part);
        for (int64_t r = 0; r < at.rows; r++) weigh(r, part);
        const bf16* at_first = values(cache, pages[0], at.head);
        const bf16* at_second = values(cache, pages[count - 1], at.head);
        for (int64_t d = 0; d < dim; d += COLUMNS)
            product<true>(my.shares[0], BLOCK, at.rows, Values{{at_first + 2 * d, at_second + 2 * d}, 2 * dim, next},
                          count * PAGE, part.values + d, dim);
    }

    // The pages of a block, and how many of them it needs.
    const int32_t* pages_at(int64_t from) const { return step.pages + at.row * step.width + from / PAGE; }
    int64_t pages_of(int64_t from) const { return at.end - from > PAGE ? 2 : 1; }

    // Beside what many rows need, two blocks have no room in the first cache.
    Ahead ahead(int64_t from) const { return {cache, pages_at(from), pages_of(from), at.head, at.rows <= LANES}; }

    // Turns the scores of up to 16 rows into powers of 2, and fits what the rows have found to their new maxima.
    void fit(int64_t first, int64_t last, int64_t from, const Found& part) const {
        __m512 most[LANES];
        for (int64_t r = first; r < first + LANES; r++)
            most[r - first] = r < last ? scale(my.scores[r], seen(my.positions[r] - from)) : _mm512_set1_ps(NEVER);
        const __m512 highest = _mm512_load_ps(part.highest + first), next = _mm512_max_ps(highest, maxima(most));
        alignas(64) float raised[LANES];
        _mm512_store_ps(raised, next);
        const uint32_t higher = _mm512_mask_cmplt_ps_mask((1u << (last - first)) - 1, highest, next);
        for (uint32_t left = higher; left; left &= left - 1) {
            const int n = __builtin_ctz(left);
            raise(part, first + n, raised[n]);
        }
    }

    // Scales and caps a row's scores, of which it sees some, and gives the largest among every 16th of them.
    __m512 scale(float* scores, uint64_t sees) const {
        const __m512 never = _mm512_set1_ps(NEVER);
        const __m512 scale = _mm512_set1_ps(call.softcap ? call.scale : call.scale * LOG2_E);
        __m512 most = never;
        for (int n = 0; n < BLOCK / LANES; n++) {
            const __mmask16 mask = sees >> LANES * n;
            __m512 score = _mm512_mask_mul_ps(never, mask, _mm512_load_ps(scores + LANES * n), scale);
            if (call.softcap) score = _mm512_mask_mov_ps(never, mask, capped(score));
            most = _mm512_max_ps(most, score);
            _mm512_store_ps(scores + LANES * n, score);
        }
        return most;
    }

    // Turns a row's scores into its shares of the values.
    void weigh(int64_t r, const Found& part) const {
        // Who has seen nothing yet has only scores of -infinity, and no share of anything.
        const __m512 highest = _mm512_set1_ps(part.highest[r] == NEVER ? 0.f : part.highest[r]);
        const float* scores = my.scores[r];
        __m512 sum = _mm512_load_ps(part.sums + r * LANES);
        for (int n = 0; n < BLOCK / LANES; n += 2) {
            const __m512 first = power(_mm512_sub_ps(_mm512_load_ps(scores + LANES * n), highest));
            const __m512 second = power(_mm512_sub_ps(_mm512_load_ps(scores + LANES * (n + 1)), highest));
            sum = _mm512_add_ps(_mm512_add_ps(sum, first), second);
            store(my.shares[r] + LANES * n, first, second);
        }
        _mm512_store_ps(part.sums + r * LANES, sum);
    }

    // Fits what a row has found to a new maximum.
    void raise(const Found& part, int64_t r, float highest) const {
        const float before = part.highest[r];
        part.highest[r] = highest;
        if (before == NEVER) return;  // it had found nothing
        const __m512 less = _mm512_set1_ps(std::exp2(before - highest));
        for (float* to = part.values + r * dim; to < part.values + (r + 1) * dim; to += LANES)
            _mm512_store_ps(to, _mm512_mul_ps(_mm512_load_ps(to), less));
        _mm512_store_ps(part.sums + r * LANES, _mm512_mul_ps(_mm512_load_ps(part.sums + r * LANES), less));
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

    const Cache& cache;
    const Step& step;
    const Attention& call;
    const Range at;
    const bool placing;
    const int64_t dim, group;
    Desk& my;
};

}  // namespace tgi
