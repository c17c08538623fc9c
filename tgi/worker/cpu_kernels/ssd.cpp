// See ssd.h. In float32. A thread computes all tokens of a head of a row in their order, so that results do not depend
// on where a sequence is divided into steps. Columns of a state are independent: a block of them, which fits the first
// cache, is updated for a few tokens before the next one.
#include "ssd.h"

#include <algorithm>
#include <cmath>

#include "delta_rule.h"
#include "vector_math.h"

namespace tgi {
namespace {

constexpr int64_t SSD_TOKENS = 16;  // computed at a time

// What the columns of a head's state share, for SSD_TOKENS tokens.
struct StateTokens {
    float b[SSD_TOKENS][MAX_STATE_DIM], c[SSD_TOKENS][MAX_STATE_DIM];
    float keep[SSD_TOKENS], step[SSD_TOKENS];
};

void widen_row(const Element* x, float* y, int64_t size) {
    for (int64_t i = 0; i < size; i++) y[i] = to_float(x[i]);
}

// The first `count` of 16 numbers, or all of them.
template <bool whole, class T>
TGI_INLINE Float load_part(const T* x, int64_t count) {
    return whole ? load(x) : load_first(x, count);
}

template <bool whole, class T>
TGI_INLINE void store_part(T* x, Float value, int64_t count) {
    if (whole) store(x, value);
    else store_first(x, value, count);
}

// Updates 16 * `vectors` columns of a state from its address on for one token, of a single vector the first `count`.
template <int vectors>
TGI_INLINE void advance(float* state, int64_t state_dim, int64_t step, const float* b, const float* c, float keep,
    float factor, float skip, const Element* x, Element* y, int64_t count) {
    constexpr bool whole = vectors > 1;
    const Float kept = broadcast(keep);
    Float input[vectors], out[vectors];
    for (int n = 0; n < vectors; n++) {
        const Float value = load_part<whole>(x + n * LANES, count);
        input[n] = value * broadcast(factor);
        out[n] = value * broadcast(skip);
    }
    for (int64_t i = 0; i < state_dim; i++) {
        const Float into = broadcast(b[i]), from = broadcast(c[i]);
        for (int n = 0; n < vectors; n++) {
            float* const at = state + i * step + n * LANES;
            const Float next = fma(into, input[n], kept * load_part<whole>(at, count));
            out[n] = fma(next, from, out[n]);
            store_part<whole>(at, next, count);
        }
    }
    for (int n = 0; n < vectors; n++) store_part<whole>(y + n * LANES, out[n], count);
}

struct SsdJob final : Job {
    SsdJob(const StateRows& rows, const SsdCall& call) : rows(rows), call(call) {}

    int64_t chunks() const { return rows.rows * call.heads; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t row = chunk / call.heads, head = chunk % call.heads;
        float* const state = rows.state(call.state, row) + head * call.state_dim * call.head_dim;
        if (rows.starts(row)) std::fill_n(state, call.state_dim * call.head_dim, 0.f);
        StateTokens tokens;
        for (int64_t token = rows.bounds[row]; token < rows.bounds[row + 1]; token += SSD_TOKENS) {
            const int64_t count = std::min<int64_t>(rows.bounds[row + 1] - token, SSD_TOKENS);
            for (int64_t n = 0; n < count; n++) prepare(head, token + n, n, tokens);
            int64_t at = 0;
            for (; at + WIDE * LANES <= call.head_dim; at += WIDE * LANES) columns<WIDE>(state, head, token, count, at, tokens);
            for (; at < call.head_dim; at += LANES) columns<1>(state, head, token, count, at, tokens);
        }
    }

    // B, C and the factors of a head for one token.
    void prepare(int64_t head, int64_t token, int64_t n, StateTokens& tokens) const {
        const int64_t group = head / (call.heads / call.groups);
        const Element* b = call.x + token * call.x_step + call.heads * call.head_dim + group * call.state_dim;
        widen_row(b, tokens.b[n], call.state_dim);
        widen_row(b + call.groups * call.state_dim, tokens.c[n], call.state_dim);
        const float dt = call.dt_scale * to_float(call.dt[token * call.dt_step + head]) + call.offset[head];
        const float step = dt > 20.f ? dt : std::log1p(std::exp(dt));
        tokens.step[n] = std::min(std::max(step, call.least), call.most);
        tokens.keep[n] = std::exp(-call.decay[head] * tokens.step[n]);
    }

    template <int vectors>
    void columns(float* state, int64_t head, int64_t token, int64_t count, int64_t at, const StateTokens& tokens) const {
        const int64_t column = head * call.head_dim + at, last = std::min(call.head_dim - at, LANES);
        for (int64_t n = 0; n < count; n++) {
            advance<vectors>(state + at, call.state_dim, call.head_dim, tokens.b[n], tokens.c[n], tokens.keep[n],
                tokens.step[n], call.skip[head], call.x + (token + n) * call.x_step + column,
                call.y + (token + n) * call.heads * call.head_dim + column, last);
            float* const kept = rows.kept_state(call.state, token + n);
            if (!kept) continue;
            const int64_t from = head * call.state_dim * call.head_dim + at;
            for (int64_t i = 0; i < call.state_dim; i++)
                std::copy_n(state + i * call.head_dim + at, vectors == 1 ? last : vectors * LANES,
                    kept + from + i * call.head_dim);
        }
    }

    static constexpr int WIDE = 4;  // vectors of a block of columns
    const StateRows& rows;
    const SsdCall& call;
};

struct GatedNormJob final : Job {
    explicit GatedNormJob(const GatedNormCall& call) : call(call) {}

    int64_t chunks() const { return call.tokens * call.groups; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t token = chunk / call.groups, group = chunk % call.groups, size = call.size;
        Element* const y = call.y + chunk * size;
        const Element* const z = call.z + token * call.z_step + group * size;
        Float factor = broadcast(1.f);
        if (call.form != GatedNormForm::NONE) {
            Float sum = zeros();
            for (int64_t at = 0; at < size; at += LANES) {
                const Float x = value(y, z, at);
                sum = fma(x, x, sum);
            }
            factor = broadcast(1.f / std::sqrt(reduce_add(sum) / size + call.epsilon));
        }
        for (int64_t at = 0; at < size; at += LANES) {
            const int64_t count = std::min(size - at, LANES);
            Float x = value(y, z, at) * factor * load_first(call.weight + group * size + at, count);
            if (call.form == GatedNormForm::GATE_LAST) x = x * gate(z + at, count);
            store_first(y + at, x, count);
        }
    }

    // What the norm applies to: 16 numbers from `at` on, zeros after the last one.
    Float value(const Element* y, const Element* z, int64_t at) const {
        const int64_t count = std::min(call.size - at, LANES);
        const Float x = load_first(y + at, count);
        return call.form == GatedNormForm::GATE_LAST ? x : x * gate(z + at, count);
    }

    Float gate(const Element* z, int64_t count) const {
        return silu(load_first(z, count) * broadcast(call.gate_scale));
    }

    const GatedNormCall& call;
};

}  // namespace

void ssd(ThreadPool& pool, const StateRows& rows, const SsdCall& call) {
    const SsdJob job(rows, call);
    pool.run(job, job.chunks());
}

void gated_norm(ThreadPool& pool, const GatedNormCall& call) {
    const GatedNormJob job(call);
    pool.run(job, job.chunks());
}

}  // namespace tgi
