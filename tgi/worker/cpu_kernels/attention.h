// Paged attention. See attention.cpp.
#pragma once
#include <cstdint>

#include "kv_cache.h"
#include "thread_pool.h"

namespace tgi {

// y [tokens, heads * result_dim] = softmax(cap(scale * q k) - slope * distance) v. A query sees the last `window`
// positions, its own included, or all of them if `window` is 0, and the next `ahead` ones, as far as the context goes; 0:
// causal attention. If `chunked`, it sees those of its own chunk of `window` positions instead. cap(s) = softcap *
// tanh(s / softcap), or s if softcap is 0. `sinks` [heads] are scores without a value, which only add to the sum of the
// softmax; may be null. `slopes` [heads], of ALiBi, may be null; not with a softcap.
struct AttentionCall {
    const Element* qkv;  // [tokens, row_size]: the queries, keys and, if they are stored, values of each token
    Element* y;
    int64_t window;
    float scale, softcap;
    int64_t ahead = 0;
    const float* sinks = nullptr;
    bool chunked = false;
    const float* slopes = nullptr;

    // The first position that a query at `position` sees; it may be negative.
    int64_t first_seen(int64_t position) const {
        if (!window) return 0;
        return chunked ? position / window * window : position - window + 1;
    }

    // The last position that a query at `position` sees, if the context goes so far.
    int64_t last_seen(const AttentionBatch& batch, int64_t token, int64_t position) const {
        return batch.last_keys && (window || !batch.windows_alone) ? batch.last_keys[token] : position + ahead;
    }
};

// Writes the keys and values to their slots, then computes y.
void attention(ThreadPool& pool, const KvCache& cache, const AttentionBatch& batch, const AttentionCall& call);

// Writes keys and values [tokens, 2 * kv_heads, head_dim] to their slots; the cache has no query heads.
void write_kv(ThreadPool& pool, const KvCache& cache, const int64_t* slots, int64_t tokens, const Element* pairs);

}  // namespace tgi
