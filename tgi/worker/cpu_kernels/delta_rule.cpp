// See delta_rule.h. In float32. A thread computes all tokens of a head of a row in their order, so that results do not
// depend on where a sequence is divided into steps. Columns of a state are independent: a block of them, which fits the
// first cache, is updated for a few tokens before the next one.
#include "delta_rule.h"

#include <algorithm>
#include <cmath>

#include "vector_math.h"

namespace tgi {
namespace {

constexpr int64_t TOKENS = 16;  // computed at a time

// What the columns of a head's state share, for TOKENS tokens.
struct HeadTokens {
    alignas(64) float q[TOKENS][MAX_STATE_DIM], k[TOKENS][MAX_STATE_DIM], y[TOKENS][MAX_STATE_DIM];
    float keep[TOKENS], beta[TOKENS];
};

float dot_self(const float* x, int64_t size) {
    Float sum = zeros();
    for (int64_t at = 0; at < size; at += LANES) {
        const Float part = load_first(x + at, std::min(size - at, LANES));
        sum = fma(part, part, sum);
    }
    return reduce_add(sum);
}

// y = x with the length `length`.
void scale_to(const Element* x, float* y, int64_t size, float length) {
    for (int64_t at = 0; at < size; at += LANES) {
        const int64_t count = std::min(size - at, LANES);
        store_first(y + at, load_first(x + at, count), count);
    }
    const Float factor = broadcast(length / std::sqrt(dot_self(y, size) + 1e-6f));
    for (int64_t at = 0; at < size; at += LANES) {
        const int64_t count = std::min(size - at, LANES);
        store_first(y + at, load_first(y + at, count) * factor, count);
    }
}

float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

// Updates 16 * `vectors` columns of a state from `at` on, the last 16 of them `count`, for one token.
template <int vectors>
TGI_INLINE void update(float* state, int64_t key_dim, int64_t step, const float* q, const float* k, float keep,
    float beta, const Element* v, float* y, int64_t count) {
    Float sums[vectors] = {};
    for (int64_t i = 0; i < key_dim; i++) {
        const Float key = broadcast(k[i]);
        for (int n = 0; n < vectors; n++)
            sums[n] = fma(vectors == 1 ? load_first(state + i * step, count) : load(state + i * step + n * LANES), key,
                sums[n]);
    }
    const Float kept = broadcast(keep);
    Float delta[vectors], out[vectors] = {};
    for (int n = 0; n < vectors; n++) {
        const Float value = vectors == 1 ? load_first(v, count) : load(v + n * LANES);
        delta[n] = fnma(kept, sums[n], value) * broadcast(beta);
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const Float key = broadcast(k[i]), query = broadcast(q[i]);
        for (int n = 0; n < vectors; n++) {
            float* const at = state + i * step + n * LANES;
            const Float next = fma(key, delta[n], kept * (vectors == 1 ? load_first(at, count) : load(at)));
            out[n] = fma(next, query, out[n]);
            if (vectors == 1) store_first(at, next, count);
            else store(at, next);
        }
    }
    for (int n = 0; n < vectors; n++) {
        if (vectors == 1) store_first(y, out[n], count);
        else store(y + n * LANES, out[n]);
    }
}

struct DeltaJob final : Job {
    DeltaJob(const StateRows& rows, const DeltaCall& call) : rows(rows), call(call) {}

    int64_t chunks() const { return rows.rows * call.value_heads; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t row = chunk / call.value_heads, head = chunk % call.value_heads;
        float* const state = rows.state(call.state, row) + head * call.key_dim * call.value_dim;
        if (rows.starts(row)) std::fill_n(state, call.key_dim * call.value_dim, 0.f);
        HeadTokens tokens;
        for (int64_t token = rows.bounds[row]; token < rows.bounds[row + 1]; token += TOKENS) {
            const int64_t count = std::min<int64_t>(rows.bounds[row + 1] - token, TOKENS);
            for (int64_t n = 0; n < count; n++) prepare(head, token + n, n, tokens);
            int64_t at = 0;
            for (; at + WIDE * LANES <= call.value_dim; at += WIDE * LANES) columns<WIDE>(state, head, token, count, at, tokens);
            for (; at < call.value_dim; at += LANES) columns<1>(state, head, token, count, at, tokens);
            for (int64_t n = 0; n < count; n++) finish(head, token + n, tokens.y[n]);
        }
    }

    // The queries, keys and factors of a head for one token.
    void prepare(int64_t head, int64_t token, int64_t n, HeadTokens& tokens) const {
        const int64_t key_head = head / (call.value_heads / call.key_heads);
        const Element* q = call.x + token * call.x_step + key_head * call.key_dim;
        scale_to(q, tokens.q[n], call.key_dim, 1.f / std::sqrt(float(call.key_dim)));
        scale_to(q + call.key_heads * call.key_dim, tokens.k[n], call.key_dim, 1.f);
        const Element* ba = call.ba + token * 2 * call.value_heads;
        tokens.beta[n] = call.most / (1.f + std::exp(-to_float(ba[head])));
        const float a = to_float(ba[call.value_heads + head]);
        tokens.keep[n] = std::exp(-call.decay[head] * softplus(a + call.offset[head]));
    }

    template <int vectors>
    void columns(float* state, int64_t head, int64_t token, int64_t count, int64_t at, HeadTokens& tokens) const {
        const int64_t values = 2 * call.key_heads * call.key_dim + head * call.value_dim + at;
        const int64_t last = std::min(call.value_dim - at, LANES);
        for (int64_t n = 0; n < count; n++) {
            update<vectors>(state + at, call.key_dim, call.value_dim, tokens.q[n], tokens.k[n], tokens.keep[n],
                tokens.beta[n], call.x + (token + n) * call.x_step + values, tokens.y[n] + at, last);
            float* const kept = rows.kept_state(call.state, token + n);
            if (!kept) continue;
            const int64_t from = head * call.key_dim * call.value_dim + at;
            for (int64_t i = 0; i < call.key_dim; i++)
                std::copy_n(state + i * call.value_dim + at, vectors == 1 ? last : vectors * LANES,
                    kept + from + i * call.value_dim);
        }
    }

    void finish(int64_t head, int64_t token, const float* out) const {
        const int64_t size = call.value_dim;
        const Float factor = broadcast(1.f / std::sqrt(dot_self(out, size) / size + call.epsilon));
        const Element* z = call.z + token * call.z_step + head * size;
        Element* y = call.y + (token * call.value_heads + head) * size;
        for (int64_t at = 0; at < size; at += LANES) {
            const int64_t count = std::min(size - at, LANES);
            const Float normed = load_first(out + at, count) * factor * load_first(call.norm + at, count);
            store_first(y + at, normed * silu(load_first(z + at, count)), count);
        }
    }

    static constexpr int WIDE = 4;  // vectors of a block of columns
    const StateRows& rows;
    const DeltaCall& call;
};

}  // namespace

void delta_rule(ThreadPool& pool, const StateRows& rows, const DeltaCall& call) {
    const DeltaJob job(rows, call);
    pool.run(job, job.chunks());
}

}  // namespace tgi
