// See causal_conv.h. In float32, the sum of a token beginning with its oldest input. The inputs of a window have the
// type of the state, so that it does not matter where a sequence is divided into steps.
#include "causal_conv.h"

#include <algorithm>

#include "vector_math.h"

namespace tgi {
namespace {

// Rounded to the type of the buffers.
TGI_INLINE Float rounded(Float x) {
    alignas(64) Element each[LANES];
    store(each, x);
    return load(each);
}

struct ConvJob final : Job {
    ConvJob(const StateRows& rows, const ConvCall& call)
        : rows(rows), call(call), blocks((call.channels + BLOCK - 1) / BLOCK) {}

    int64_t chunks() const { return rows.rows * blocks; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t row = chunk / blocks, from = chunk % blocks * BLOCK;
        const int64_t last = std::min(from + BLOCK, call.channels);
        for (int64_t at = from; at < last; at += LANES) {
            const int64_t count = std::min(last - at, LANES);
            if (call.form == ConvForm::GATED) channels<ConvForm::GATED>(row, at, count);
            else channels<ConvForm::PLAIN>(row, at, count);
        }
    }

    // The `count` channels from `at` on, token by token.
    template <ConvForm form>
    void channels(int64_t row, int64_t at, int64_t count) const {
        const int64_t past = call.kernel - 1, size = call.channels;
        Element* const state = rows.state(call.window, row) + at;
        const bool starts = rows.starts(row);
        Float window[MAX_CONV_KERNEL], weight[MAX_CONV_KERNEL];
        for (int64_t n = 0; n < past; n++) window[n] = starts ? zeros() : load_first(state + n * size, count);
        for (int64_t n = 0; n <= past; n++) weight[n] = load_first(call.weight + n * size + at, count);
        const Float bias = call.bias ? load_first(call.bias + at, count) : zeros();
        for (int64_t token = rows.bounds[row]; token < rows.bounds[row + 1]; token++) {
            const Element* x = call.x + token * call.x_step + at;
            Float input = load_first(x, count);
            if (form == ConvForm::GATED) input = rounded(input * load_first(x + 2 * size, count));
            window[past] = input;
            Float sum = bias;
            for (int64_t n = 0; n <= past; n++) sum = fma(window[n], weight[n], sum);
            for (int64_t n = 0; n < past; n++) window[n] = window[n + 1];
            sum = form == ConvForm::GATED ? sum * load_first(x + size, count) : silu(sum);
            store_first(call.y + token * call.y_step + at, sum, count);
            if (Element* const kept = rows.kept_state(call.window, token))
                for (int64_t n = 0; n < past; n++) store_first(kept + n * size + at, window[n], count);
        }
        for (int64_t n = 0; n < past; n++) store_first(state + n * size, window[n], count);
    }

    static constexpr int64_t BLOCK = 4 * LANES;  // channels of a chunk
    const StateRows& rows;
    const ConvCall& call;
    const int64_t blocks;
};

}  // namespace

void causal_conv(ThreadPool& pool, const StateRows& rows, const ConvCall& call) {
    const ConvJob job(rows, call);
    pool.run(job, job.chunks());
}

}  // namespace tgi
