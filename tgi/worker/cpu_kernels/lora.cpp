// The LoRA sums of projections: plus = (x a) b for the tokens that have an adapter.
//
// Tokens of one adapter are computed together, in tiles of up to 32. As in all products, a token's result does not
// depend on the other tokens, so neither on the requests that share its adapter nor on the other adapters.
#include "lora.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine.h"

namespace tgi {
namespace {

constexpr int64_t padded(int64_t size) { return (size + 31) / 32 * 32; }

struct LoraJob final : Job {
    explicit LoraJob(const LoraCall& call) : call(call) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t tile = chunk / call.parts, part = chunk % call.parts;
        const int64_t* tokens = call.tokens + call.tiles[tile];
        const int64_t rows = call.tiles[tile + 1] - call.tiles[tile];
        const int64_t begin = call.bounds[part], outputs = call.bounds[part + 1] - begin;
        const LoraPair& pair = call.adapters[call.tile_adapters[tile]][part];
        if (!pair.rank) {
            for (int64_t r = 0; r < rows; r++)
                memset(call.plus + tokens[r] * call.width + begin, 0, outputs * sizeof(float));
            return;
        }
        const int64_t depth = padded(call.inputs);
        static thread_local std::vector<Operand> gathered, thin;
        gathered.resize(rows * depth);
        thin.resize(rows * pair.rank);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < depth; k += LANES)
                store(&gathered[r * depth + k], load_first(call.x + tokens[r] * call.inputs + k,
                    std::clamp<int64_t>(call.inputs - k, 0, LANES)));
        alignas(64) float sums[MAX_TILE_ROWS][COLUMNS];
        configure_tiles(rows);
        for (int64_t at = 0; at < pair.rank; at += COLUMNS) {
            tile_matmul(gathered.data(), depth, rows, pair.a + at * depth, COLUMNS, depth, sums[0], COLUMNS);
            for (int64_t r = 0; r < rows; r++)
                store(&thin[r * pair.rank + at], load(sums[r]), load(sums[r] + LANES));
        }
        for (int64_t at = 0; at < outputs; at += COLUMNS) {
            tile_matmul(thin.data(), pair.rank, rows, pair.b + at * pair.rank, COLUMNS, pair.rank, sums[0], COLUMNS);
            for (int64_t r = 0; r < rows; r++)
                memcpy(call.plus + tokens[r] * call.width + begin + at, sums[r],
                    std::min(outputs - at, COLUMNS) * sizeof(float));
        }
    }

    const LoraCall& call;
};

}  // namespace

void lora(ThreadPool& pool, const LoraCall& call) { pool.run(LoraJob(call), call.count * call.parts); }

}  // namespace tgi
