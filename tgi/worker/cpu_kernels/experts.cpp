// Rows are sorted by expert, so that each expert's weights are read once for all its rows; the products of all experts
// are one job. A row's result is summed over its experts from the first choice on, so it does not depend on the experts
// that other rows choose.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace tgi {
namespace {

constexpr int64_t BLOCK_ROWS = 1024;  // rows that are sorted together: bounds the scratch memory
constexpr int64_t EXPERT_CHUNK_ROWS = 8;  // rows of a chunk of the jobs below
constexpr float LEAST_SUM = 1e-20f;  // added to the sum of weights, which may be 0

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Scratch memory of the calling thread.
struct ExpertsWorkspace {
    template <class T>
    static T* reserve(std::vector<T>& room, int64_t size) {
        if ((int64_t)room.size() < size) room.resize(size);
        return room.data();
    }

    std::vector<Element> logits, gathered, inner, parts, shared_inner, shared_parts, shared_gates;
    std::vector<float> weights;  // [rows, top_k]
    std::vector<int64_t> chosen, positions, sources, begins;
    std::vector<WeightRows> up, down;
};

LinearCall linear_call(const PackedWeight& weight, const float* bias, Epilogue epilogue, const Element* x, Element* y,
    int64_t rows) {
    LinearCall call{x, weight, bias};
    call.y = y, call.rows = rows, call.epilogue = epilogue;
    return call;
}

struct RowsJob : Job {
    explicit RowsJob(int64_t rows) : rows(rows) {}

    int64_t chunks() const { return (rows + EXPERT_CHUNK_ROWS - 1) / EXPERT_CHUNK_ROWS; }

    void run(int64_t chunk, int64_t) const override {
        for (int64_t row = chunk * EXPERT_CHUNK_ROWS; row < std::min((chunk + 1) * EXPERT_CHUNK_ROWS, rows); row++) one(row);
    }

    virtual void one(int64_t row) const = 0;

    const int64_t rows;
};

// Writes the experts of each row, the first choice first, and what they count. Equal scores: the lower number first.
struct ChooseJob final : RowsJob {
    ChooseJob(const RouterRule& rule, const Element* logits, int64_t rows, int64_t* chosen, float* weights)
        : RowsJob(rows), rule(rule), logits(logits), chosen(chosen), weights(weights) {}

    void one(int64_t row) const override {
        const int64_t count = rule.experts;
        static thread_local std::vector<float> room;
        float* const scores = ExpertsWorkspace::reserve(room, 2 * (count + LANES));
        float* const choice = scores + count + LANES;
        for (int64_t at = 0; at < count; at += LANES)
            store(scores + at, load_first(logits + row * count + at, std::min(count - at, LANES)));
        if (rule.score == RouterScore::SPARSEMIXER) return mix_sparsely(row, scores, choice);
        if (rule.score == RouterScore::SIGMOID) {
            for (int64_t k = 0; k < count; k++) scores[k] = sigmoid(scores[k]);
        } else {
            const float most = *std::max_element(scores, scores + count);
            float sum = 0;
            for (int64_t k = 0; k < count; k++) sum += scores[k] = std::exp(scores[k] - most);
            for (int64_t k = 0; k < count; k++) scores[k] /= sum;
        }
        for (int64_t k = 0; k < count; k++) choice[k] = rule.bias ? scores[k] + rule.bias[k] : scores[k];
        if (rule.groups > 1) exclude_groups(choice);
        float sum = 0;
        for (int64_t n = 0; n < rule.top_k; n++) {
            const int64_t best = std::max_element(choice, choice + count) - choice;
            choice[best] = EXCLUDED;
            chosen[row * rule.top_k + n] = best;
            weights[row * rule.top_k + n] = scores[best];
            sum += scores[best];
        }
        for (int64_t n = 0; n < rule.top_k; n++) {
            float& weight = weights[row * rule.top_k + n];
            weight = (rule.normalized ? weight / (sum + LEAST_SUM) : weight) * rule.scale;
            if (rule.expert_scales) weight *= rule.expert_scales[chosen[row * rule.top_k + n]];
        }
    }

    // Chooses one expert after the other. Its weight is a softmax over those logits, of experts not chosen before, that
    // are nearly as large.
    void mix_sparsely(int64_t row, const float* logits, float* left) const {
        std::copy_n(logits, rule.experts, left);
        for (int64_t n = 0; n < rule.top_k; n++) {
            const int64_t best = std::max_element(left, left + rule.experts) - left;
            const float most = left[best];
            float sum = 0;
            for (int64_t k = 0; k < rule.experts; k++) {
                if (left[k] == EXCLUDED) continue;
                const float factor = std::max(std::abs(logits[k]), most);
                if (!((most - logits[k]) / factor > 2 * rule.jitter)) sum += std::exp(logits[k] - most);
            }
            left[best] = EXCLUDED;
            chosen[row * rule.top_k + n] = best;
            weights[row * rule.top_k + n] = 1 / sum;
        }
    }

    // Excludes all groups but those whose best, or two best, have the largest sums.
    void exclude_groups(float* choice) const {
        const int64_t size = rule.experts / rule.groups;
        float sums[MAX_GROUPS];
        for (int64_t group = 0; group < rule.groups; group++) {
            float first = EXCLUDED, second = EXCLUDED;
            for (const float* at = choice + group * size; at < choice + (group + 1) * size; at++) {
                if (*at > first) second = first, first = *at;
                else if (*at > second) second = *at;
            }
            sums[group] = rule.group_best > 1 ? first + second : first;
        }
        bool kept[MAX_GROUPS] = {};
        for (int64_t n = 0; n < rule.top_groups; n++) {
            const int64_t best = std::max_element(sums, sums + rule.groups) - sums;
            kept[best] = true, sums[best] = -std::numeric_limits<float>::infinity();
        }
        for (int64_t group = 0; group < rule.groups; group++)
            if (!kept[group]) std::fill_n(choice + group * size, size, EXCLUDED);
    }

    static constexpr float EXCLUDED = std::numeric_limits<float>::lowest();
    static constexpr int64_t MAX_GROUPS = 64;
    const RouterRule& rule;
    const Element* const logits;
    int64_t* const chosen;
    float* const weights;
};

// The input of each choice, in the order of `sources`; times its weight if `weights` is not null.
struct GatherJob final : RowsJob {
    GatherJob(const Element* x, const int64_t* sources, const float* weights, int64_t top_k, int64_t rows,
        int64_t width, Element* y)
        : RowsJob(rows), x(x), sources(sources), weights(weights), top_k(top_k), width(width), y(y) {}

    void one(int64_t row) const override {
        const Element* const from = x + sources[row] / top_k * width;
        if (!weights) {
            std::copy_n(from, width, y + row * width);
            return;
        }
        const Float weight = broadcast(weights[sources[row]]);
        for (int64_t at = 0; at < width; at += LANES) {
            const int64_t count = std::min(width - at, LANES);
            store_first(y + row * width + at, load_first(from + at, count) * weight, count);
        }
    }

    const Element* const x;
    const int64_t* const sources;
    const float* const weights;
    const int64_t top_k, width;
    Element* const y;
};

// Adds up the parts of each row in float32, times their weights unless `weights` is null, and the shared expert's
// result, if there is one.
struct CombineJob final : RowsJob {
    CombineJob(const Element* parts, const int64_t* positions, const float* weights, int64_t top_k,
        const Element* shared, const Element* gates, int64_t rows, int64_t width, Element* y)
        : RowsJob(rows), parts(parts), positions(positions), weights(weights), top_k(top_k), shared(shared),
          gates(gates), width(width), y(y) {}

    void one(int64_t row) const override {
        float gate = 1;
        if (gates) {
            alignas(64) float first[LANES];
            store(first, load_first(gates + row, 1));
            gate = sigmoid(first[0]);
        }
        for (int64_t at = 0; at < width; at += LANES) {
            const int64_t count = std::min(width - at, LANES);
            Float sum = zeros();
            for (int64_t n = row * top_k; n < (row + 1) * top_k; n++)
                sum = sum + load_first(parts + positions[n] * width + at, count) * broadcast(weights ? weights[n] : 1);
            if (shared) sum = sum + load_first(shared + row * width + at, count) * broadcast(gate);
            store_first(y + row * width + at, sum, count);
        }
    }

    const Element* const parts;
    const int64_t* const positions;
    const float* const weights;
    const int64_t top_k;
    const Element *const shared, *const gates;
    const int64_t width;
    Element* const y;
};

// Sorts the choices of all rows by expert: `positions` [rows, top_k] is where each of them goes, `sources` the choice
// that is there, and expert e has the positions begins[e] to begins[e + 1] - 1.
void sort_by_expert(const int64_t* chosen, int64_t rows, int64_t top_k, std::vector<int64_t>& begins,
    int64_t* positions, int64_t* sources) {
    std::fill(begins.begin(), begins.end(), 0);
    for (int64_t n = 0; n < rows * top_k; n++) begins[chosen[n] + 1]++;
    for (size_t expert = 1; expert < begins.size(); expert++) begins[expert] += begins[expert - 1];
    for (int64_t n = 0; n < rows * top_k; n++) {
        positions[n] = begins[chosen[n]]++;
        sources[positions[n]] = n;
    }
    for (size_t expert = begins.size() - 1; expert > 0; expert--) begins[expert] = begins[expert - 1];
    begins[0] = 0;
}

void run_block(ThreadPool& pool, const Experts& experts, const Element* x, const Element* seen, Element* y,
    int64_t rows) {
    static thread_local ExpertsWorkspace room;
    const RouterRule& rule = experts.rule;
    const PackedWeight &up = experts.shape.up, &down = experts.shape.down;
    const int64_t hidden = experts.router.inputs, all = rows * rule.top_k;

    Element* const logits = room.reserve(room.logits, rows * rule.experts);
    linear(pool, linear_call(experts.router, experts.router_bias, Epilogue::none, seen, logits, rows));
    int64_t* const chosen = room.reserve(room.chosen, all);
    float* const weights = room.reserve(room.weights, all);
    const ChooseJob choose(rule, logits, rows, chosen, weights);
    pool.run(choose, choose.chunks());

    int64_t *const positions = room.reserve(room.positions, all), *const sources = room.reserve(room.sources, all);
    room.begins.resize(rule.experts + 1);
    sort_by_expert(chosen, rows, rule.top_k, room.begins, positions, sources);
    room.up.clear(), room.down.clear();
    for (int64_t expert = 0; expert < rule.experts; expert++) {
        const int64_t first = room.begins[expert], count = room.begins[expert + 1] - first;
        if (!count) continue;
        room.up.push_back({experts.up[expert], experts.up_bias[expert], first, count});
        room.down.push_back({experts.down[expert], experts.down_bias[expert], first, count});
    }
    Element* const gathered = room.reserve(room.gathered, all * hidden);
    const GatherJob gather(x, sources, rule.scales_inputs ? weights : nullptr, rule.top_k, all, hidden, gathered);
    pool.run(gather, gather.chunks());
    Element* const inner = room.reserve(room.inner, all * up.outputs);
    grouped_linear(pool, linear_call(up, nullptr, experts.shape.activation, gathered, inner, all), room.up);
    Element* const parts = room.reserve(room.parts, all * hidden);
    grouped_linear(pool, linear_call(down, nullptr, Epilogue::none, inner, parts, all), room.down);

    const Element *shared = nullptr, *gates = nullptr;
    if (const ExpertMlp& mlp = experts.shared; mlp.up.at) {
        Element* const shared_inner = room.reserve(room.shared_inner, rows * mlp.up.outputs);
        linear(pool, linear_call(mlp.up, mlp.up_bias, mlp.activation, x, shared_inner, rows));
        Element* const shared_parts = room.reserve(room.shared_parts, rows * hidden);
        linear(pool, linear_call(mlp.down, mlp.down_bias, Epilogue::none, shared_inner, shared_parts, rows));
        shared = shared_parts;
    }
    if (experts.shared_gate.at) {
        Element* const found = room.reserve(room.shared_gates, rows);
        linear(pool, linear_call(experts.shared_gate, nullptr, Epilogue::none, x, found, rows));
        gates = found;
    }
    const CombineJob combine(parts, positions, rule.scales_inputs ? nullptr : weights, rule.top_k, shared, gates, rows,
        hidden, y);
    pool.run(combine, combine.chunks());
}

}  // namespace

void run_experts(ThreadPool& pool, const Experts& experts, const Element* x, const Element* seen, Element* y,
    int64_t rows) {
    const int64_t hidden = experts.router.inputs;
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
        run_block(pool, experts, x + row * hidden, seen + row * hidden, y + row * hidden,
            std::min(rows - row, BLOCK_ROWS));
}

}  // namespace tgi
