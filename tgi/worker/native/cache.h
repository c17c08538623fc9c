// Where keys and values stand in the cache (see attention.h), and how they come there.
#pragma once
#include <algorithm>
#include <cstring>

#include "attention.h"

namespace tgi {

constexpr int64_t PAGE = 32;  // positions of a page

inline bf16* keys(const Cache& cache, int64_t page, int64_t head) {
    return cache.at + (page * cache.kv_heads + head) * 2 * PAGE * cache.head_dim;
}

inline bf16* values(const Cache& cache, int64_t page, int64_t head) {
    return keys(cache, page, head) + PAGE * cache.head_dim;
}

// Writes a token's key and value of one head to the cache.
inline void place(const Cache& cache, const Step& step, const bf16* qkv, int64_t token, int64_t head) {
    const int64_t dim = cache.head_dim, heads = cache.heads + cache.kv_heads;
    const bf16* row = qkv + token * (heads + cache.kv_heads) * dim;
    const int64_t page = step.places[token] / PAGE, at = step.places[token] % PAGE;
    const bf16 *key = row + (cache.heads + head) * dim, *value = row + (heads + head) * dim;
    bf16 *to = keys(cache, page, head) + 2 * at, *into = values(cache, page, head) + at / 2 * 2 * dim + at % 2;
    for (int64_t d = 0; d < dim; d += 2) memcpy(to + d * PAGE, key + d, 4);
    // An overflow in one request must not reach the next owner of its pages, who multiplies it with zero.
    for (int64_t d = 0; d < dim; d++) into[2 * d] = (value[d] & 0x7f80) == 0x7f80 ? 0 : value[d];
}

struct PlaceJob final : Job {
    PlaceJob(const Cache& cache, const Step& step, const bf16* qkv) : cache(cache), step(step), qkv(qkv) {}

    int64_t chunks() const { return (step.bounds[step.rows] + SHARE - 1) / SHARE; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min<int64_t>((chunk + 1) * SHARE, step.bounds[step.rows]);
        for (int64_t token = chunk * SHARE; token < last; token++)
            for (int64_t head = 0; head < cache.kv_heads; head++) place(cache, step, qkv, token, head);
    }

    static constexpr int64_t SHARE = 8;  // tokens of a chunk
    const Cache& cache;
    const Step& step;
    const bf16* qkv;
};

}  // namespace tgi
