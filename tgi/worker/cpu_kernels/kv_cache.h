// The layout of the paged KV cache, the attention batch of a step, and the writing of keys and values.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

constexpr int64_t PAGE = 32;  // positions of a page

// The keys and values of one layer, [pages][kv_heads][2 * PAGE * head_dim]: for each page and head first the keys as
// [head_dim / 2][PAGE][2], then the values as [PAGE / 2][head_dim][2].
struct KvCache {
    bf16* at;
    int64_t heads, kv_heads, head_dim;
};

// Row r is a sequence with the tokens bounds[r] to bounds[r + 1] - 1. It sees context_lengths[r] positions, whose pages
// are pages[r * width], ...
struct AttentionBatch {
    const int64_t* slots;  // [tokens] slot mapping: where each token's key and value go, page * PAGE + offset
    const int32_t* bounds;
    const int32_t* context_lengths;
    const int32_t* pages;
    int64_t rows, width;
};

inline bf16* keys(const KvCache& cache, int64_t page, int64_t head) {
    return cache.at + (page * cache.kv_heads + head) * 2 * PAGE * cache.head_dim;
}

inline bf16* values(const KvCache& cache, int64_t page, int64_t head) {
    return keys(cache, page, head) + PAGE * cache.head_dim;
}

// Writes a token's key and value of one head.
inline void write_kv(const KvCache& cache, const AttentionBatch& batch, const bf16* qkv, int64_t token, int64_t head) {
    const int64_t dim = cache.head_dim, heads = cache.heads + cache.kv_heads;
    const bf16* row = qkv + token * (heads + cache.kv_heads) * dim;
    const int64_t page = batch.slots[token] / PAGE, at = batch.slots[token] % PAGE;
    const bf16 *key = row + (cache.heads + head) * dim, *value = row + (heads + head) * dim;
    bf16 *to = keys(cache, page, head) + 2 * at, *into = values(cache, page, head) + at / 2 * 2 * dim + at % 2;
    for (int64_t d = 0; d < dim; d += 2) memcpy(to + d * PAGE, key + d, 4);
    // Infinity and NaN become 0: a later owner of the page multiplies masked values by zero, and must not get a NaN.
    for (int64_t d = 0; d < dim; d++) into[2 * d] = (value[d].bits & 0x7f80) == 0x7f80 ? bf16{} : value[d];
}

struct WriteKvJob final : Job {
    WriteKvJob(const KvCache& cache, const AttentionBatch& batch, const bf16* qkv) : cache(cache), batch(batch),
        qkv(qkv) {}

    int64_t chunks() const { return (batch.bounds[batch.rows] + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min<int64_t>((chunk + 1) * CHUNK, batch.bounds[batch.rows]);
        for (int64_t token = chunk * CHUNK; token < last; token++)
            for (int64_t head = 0; head < cache.kv_heads; head++) write_kv(cache, batch, qkv, token, head);
    }

    static constexpr int64_t CHUNK = 8;  // tokens of a chunk
    const KvCache& cache;
    const AttentionBatch& batch;
    const bf16* qkv;
};

}  // namespace tgi
