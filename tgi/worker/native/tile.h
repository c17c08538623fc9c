// What the rows of a tile find: scores, their softmax as it goes, and the sum of the values. See attention.cpp.
#pragma once
#include <algorithm>
#include <cstring>

#include "ahead.h"
#include "attention.h"
#include "found.h"
#include "product.h"
#include "softmax.h"

namespace tgi {

constexpr int64_t WIDEST = 256;  // head_dim

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
          group(cache.heads / cache.kv_heads),
          softmax{call.softcap ? LOG2_E : call.scale * LOG2_E}, my(desk()) {}

    // Before anything is computed.
    void begin() const {
        const int64_t stride = (cache.heads + 2 * cache.kv_heads) * dim;
        ahead(at.lowest / BLOCK * BLOCK).ask_all();
        prepare(at.rows);
        each([&](int64_t r, int64_t token, int64_t head) {
            memcpy(my.queries + r * dim, call.qkv + token * stride + head * dim, dim * sizeof(bf16));
            my.positions[r] = step.contexts[at.row] - step.bounds[at.row + 1] + token;
        });
    }

    // What they find from the position `from` up to `end`.
    void compute(int64_t from, int64_t end, const Found& part) const {
        part.clear(at.rows, dim);
        end = std::min(end, at.end);
        for (from = std::max(from, at.lowest / BLOCK * BLOCK); from < end; from += BLOCK) block(from, part);
    }

    // Writes down what they have found in all.
    void finish(const Found& whole) const {
        each([&](int64_t r, int64_t token, int64_t head) {
            bf16* to = call.y + (token * cache.heads + head) * dim;
            const float* values = whole.values + r * dim;
            const __m512 share = _mm512_set1_ps(1.f / _mm512_reduce_add_ps(_mm512_load_ps(whole.sums + r * LANES)));
            for (int64_t d = 0; d < dim; d += 16) store(to + d, _mm512_mul_ps(_mm512_load_ps(values + d), share));
        });
    }

  private:
    // Tells of each row its token and query head.
    template <class Tell>
    void each(Tell tell) const {
        int64_t token = step.bounds[at.row] + at.begin / group, head = at.begin % group;
        for (int64_t r = 0; r < at.rows; r++) {
            tell(r, token, at.head * group + head);
            if (++head == group) head = 0, token++;
        }
    }

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
        const ShortPower power;
        for (int64_t r = 0; r < at.rows; r++)
            softmax.weigh(my.scores[r], my.shares[r], part.highest[r], part.sums + r * LANES, power);
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

    // Looks for the highest scores of up to 16 rows, and fits what the rows have found to their new maxima.
    void fit(int64_t first, int64_t last, int64_t from, const Found& part) const {
        __m512 most[LANES];
        for (int64_t r = first; r < first + LANES; r++) most[r - first] = _mm512_set1_ps(NEVER);
        for (int64_t r = first; r < last; r++) {
            if (call.softcap) softmax.limit(my.scores[r], call.scale, call.softcap);
            if (const uint64_t sees = seen(my.positions[r] - from); ~sees) softmax.hide(my.scores[r], sees);
            most[r - first] = softmax.most(my.scores[r]);
        }
        const __m512 highest = _mm512_load_ps(part.highest + first);
        const __m512 next = _mm512_max_ps(highest, _mm512_mul_ps(maxima(most), _mm512_set1_ps(softmax.unit)));
        alignas(64) float raised[LANES], factors[LANES];
        _mm512_store_ps(raised, next);
        _mm512_store_ps(factors, power(_mm512_sub_ps(highest, next)));
        const uint32_t higher = _mm512_mask_cmplt_ps_mask((1u << (last - first)) - 1, highest, next);
        for (uint32_t left = higher; left; left &= left - 1) {
            const int n = __builtin_ctz(left);
            raise(part, first + n, raised[n], factors[n]);
        }
    }

    // Fits what a row has found to a new maximum.
    void raise(const Found& part, int64_t r, float highest, float factor) const {
        const float before = part.highest[r];
        part.highest[r] = highest;
        if (before == NEVER) return;  // it had found nothing
        const __m512 less = _mm512_set1_ps(factor);
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

    const Cache& cache;
    const Step& step;
    const Attention& call;
    const Range at;
    const bool placing;
    const int64_t dim, group;
    const Softmax softmax;
    Desk& my;
};

}  // namespace tgi
