// The layout of the paged KV cache, the attention batch of a step, and the writing of keys and values.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"
#include "thread_pool.h"

namespace tgi {

constexpr int64_t PAGE = 32;  // positions of a page
constexpr int64_t MAX_HEAD_DIM = 576;

// How keys and values are stored.
enum class KvForm : int64_t {
    ELEMENT = 0,  // as the activations
    BF16 = 1,
    INT8 = 2,  // with one float32 scale for each key and each value of a head
};

// The numbers of a key or value with padding.
constexpr int64_t padded_to_32(int64_t size) { return (size + 31) / 32 * 32; }

// The keys and values of one layer, [pages][kv_heads][page_bytes]: for each page and head first the keys as a matrix
// [padded_dim][PAGE], then the values as a matrix [PAGE][padded_dim], both in the order of `element_index`; in INT8 the
// scales of the keys [PAGE] and of the values [PAGE] follow. Numbers from head_dim to padded_dim are never written, and
// those of the keys must be finite: the memory is zero at first.
//
// With a `value_dim`, a value is the first so many numbers of its key, and neither values nor their scales are stored.
struct KvCache {
    void* at;
    int64_t heads, kv_heads, head_dim;
    KvForm form = KvForm::ELEMENT;
    int64_t value_dim = 0;
    bool shared = false;  // an earlier layer has written the keys and values: rows are queries alone

    int64_t padded_dim() const { return padded_to_32(head_dim); }
    int64_t parts() const { return value_dim ? 1 : 2; }  // stored of each head
    int64_t result_dim() const { return value_dim ? value_dim : head_dim; }
    // Of a token's queries, keys and values.
    int64_t row_size() const { return (heads + (shared ? 0 : parts() * kv_heads)) * head_dim; }

    // Bytes of one page and head whose numbers have type T.
    template <class T>
    int64_t page_bytes() const {
        const int64_t scales = std::is_same_v<T, int8_t> ? parts() * PAGE * sizeof(float) : 0;
        return parts() * PAGE * padded_dim() * sizeof(T) + scales;
    }
};

// Row r is a sequence with the tokens bounds[r] to bounds[r + 1] - 1. It sees context_lengths[r] positions, whose pages
// are pages[r * width], ...
//
// `last_keys` [tokens] is the last position that each token sees, its own or a later one within the step; positions of
// a row do not descend. Null: its own. If `windows_alone`, it holds for layers with a window, and the others are causal.
struct AttentionBatch {
    const int64_t* slots;  // [tokens] slot mapping: where each token's key and value go, page * PAGE + offset
    const int32_t* bounds;
    const int32_t* context_lengths;
    const int32_t* pages;
    int64_t rows, width;
    const int32_t* last_keys = nullptr;
    bool windows_alone = false;
};

template <class T>
inline T* keys(const KvCache& cache, int64_t page, int64_t head) {
    return (T*)((uint8_t*)cache.at + (page * cache.kv_heads + head) * cache.page_bytes<T>());
}

template <class T>
inline T* values(const KvCache& cache, int64_t page, int64_t head) {
    return keys<T>(cache, page, head) + PAGE * cache.padded_dim();
}

// [parts][PAGE]: of the keys, of the values.
inline float* kv_scales(const KvCache& cache, int64_t page, int64_t head) {
    return (float*)(keys<int8_t>(cache, page, head) + cache.parts() * PAGE * cache.padded_dim());
}

// A vector with its infinities and NaNs replaced by 0.
inline Float finite(Float x) {
    const Float same = x - x;  // 0, or NaN
    return select(same == zeros(), x, zeros());
}

// Converts `size` numbers.
template <class T>
inline void convert(const Element* from, T* to, int64_t size) {
    for (int64_t n = 0; n < size; n += LANES) store_first(to + n, load_first(from + n, size - n), size - n);
}

// The same without infinity and NaN: they become 0, and what would be rounded to infinity becomes a large number.
template <class T>
inline void convert_finite(const Element* from, T* to, int64_t size) {
    const Float largest = broadcast(3.38e38f);
    for (int64_t n = 0; n < size; n += LANES) {
        Float x = finite(load_first(from + n, size - n));
        if (!std::is_same_v<T, Element>) x = max(min(x, largest), zeros() - largest);
        store_first(to + n, x, size - n);
    }
}

// Rounds numbers to integers from -127 to 127 times the scale that is returned. Infinity and NaN become 0.
inline float quantize_row(const Element* from, int8_t* to, int64_t size) {
    Float highest = zeros();
    for (int64_t n = 0; n < size; n += LANES) {
        const Float x = finite(load_first(from + n, size - n));
        highest = max(highest, max(x, zeros() - x));
    }
    const float largest = reduce_max(highest);
    const Float inverse = broadcast(largest > 1e-30f ? 127.f / largest : 0.f);
    alignas(64) int32_t codes[LANES];
    for (int64_t n = 0; n < size; n += LANES) {
        store(codes, to_int(round_to_even(finite(load_first(from + n, size - n)) * inverse)));
        for (int64_t i = 0; i < std::min(LANES, size - n); i++) to[n + i] = codes[i];
    }
    return largest / 127.f;
}

// Writes a token's key and value of one head.
template <class T>
inline void write_kv(const KvCache& cache, const AttentionBatch& batch, const Element* qkv, int64_t token,
    int64_t head) {
    const int64_t dim = cache.head_dim, heads = cache.heads + cache.kv_heads;
    const Element* row = qkv + token * cache.row_size();
    const int64_t page = batch.slots[token] / PAGE, at = batch.slots[token] % PAGE;
    const Element *key = row + (cache.heads + head) * dim, *value = row + (heads + head) * dim;
    T* to = keys<T>(cache, page, head) + element_index<T>(0, at, PAGE);
    T* into = values<T>(cache, page, head) + element_index<T>(at, 0, cache.padded_dim());
    alignas(64) T converted[MAX_HEAD_DIM];
    const T* from = converted;
    if constexpr (std::is_same_v<T, int8_t>) kv_scales(cache, page, head)[at] = quantize_row(key, converted, dim);
    else if (cache.value_dim) convert_finite(key, converted, dim);
    else if constexpr (std::is_same_v<T, Element>) from = key;
    else convert(key, converted, dim);
    if constexpr (IS_PAIRED<T>) {
        for (int64_t d = 0; d + 1 < dim; d += 2) memcpy(to + d * PAGE, from + d, 2 * sizeof(T));
        if (dim % 2) to[(dim - 1) * PAGE] = from[dim - 1];
    } else {
        for (int64_t d = 0; d < dim; d++) to[d * PAGE] = from[d];
    }
    if (cache.value_dim) return;
    // Infinity and NaN become 0: a later owner of the page multiplies masked values by zero, and must not get a NaN.
    if constexpr (std::is_same_v<T, int8_t>) {
        kv_scales(cache, page, head)[PAGE + at] = quantize_row(value, into, dim);
    } else {
        convert_finite(value, IS_PAIRED<T> ? converted : into, dim);
        if constexpr (IS_PAIRED<T>)
            for (int64_t d = 0; d < dim; d++) into[2 * d] = converted[d];
    }
}

template <class T>
struct WriteKvJob final : Job {
    WriteKvJob(const KvCache& cache, const AttentionBatch& batch, const Element* qkv) : cache(cache), batch(batch),
        qkv(qkv) {}

    int64_t chunks() const { return (batch.bounds[batch.rows] + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min<int64_t>((chunk + 1) * CHUNK, batch.bounds[batch.rows]);
        for (int64_t token = chunk * CHUNK; token < last; token++)
            for (int64_t head = 0; head < cache.kv_heads; head++) write_kv<T>(cache, batch, qkv, token, head);
    }

    static constexpr int64_t CHUNK = 8;  // tokens of a chunk
    const KvCache& cache;
    const AttentionBatch& batch;
    const Element* qkv;
};

}  // namespace tgi
