// All functions that Python calls (kernels.py, program.py, quantizer.py), with numbers and addresses as arguments.
// Signatures are kept in step by hand.
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include "attention.h"
#include "argmax.h"
#include "causal_conv.h"
#include "delta_rule.h"
#include "experts.h"
#include "fma_peak.h"
#include "head.h"
#include "head_products.h"
#include "linear.h"
#include "lora.h"
#include "norm.h"
#include "program.h"
#include "rank_group.h"
#include "quantize_weights.h"
#include "memory_read.h"
#include "gather_rows.h"
#include "thread_pool.h"
#include "rope.h"
#include "ssd.h"

using namespace tgi;

// All else is hidden: a process may load several libraries, which must not share variables of the same name.
#pragma GCC visibility push(default)
extern "C" {

// Creates a thread pool. Null if the system does not let this process use AMX.
ThreadPool* tgi_start(int threads, int spins) {
#if defined(__AMX_BF16__) && TGI_DOT_ENGINE
    constexpr int request_permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return nullptr;
#endif
    return new ThreadPool(threads, spins);
}

// 1: the dot engine, 0: the FMA engine (elements.h).
int64_t tgi_dot_engine() { return TGI_DOT_ENGINE; }

void tgi_stop(ThreadPool* pool) { delete pool; }

void tgi_pack(ThreadPool* pool, const void* weight, int64_t outputs, int64_t inputs, int64_t form, uint8_t* packed,
    int64_t part) {
    pack(*pool, weight, {packed, outputs, inputs, WeightFormat(form)}, part);
}

void tgi_pack_grouped(ThreadPool* pool, const uint8_t* codes, const void* scales, const void* shifts, int64_t outputs,
    int64_t inputs, int64_t form, uint8_t* packed, int64_t part) {
    pack_grouped(*pool, codes, scales, shifts, {packed, outputs, inputs, WeightFormat(form)}, part);
}

// Bytes of a packed weight.
int64_t tgi_packed_bytes(int64_t outputs, int64_t inputs, int64_t form) {
    return PackedWeight{nullptr, outputs, inputs, WeightFormat(form)}.bytes();
}

void tgi_pack_integer(ThreadPool* pool, const uint8_t* codes, const f16* scales, const uint8_t* factors,
    const int8_t* table,
                    int64_t outputs, int64_t inputs, int64_t form, uint8_t* packed, int64_t part) {
    pack_integer(*pool, codes, scales, factors, table, {packed, outputs, inputs, WeightFormat(form)}, part);
}

void tgi_quantize(ThreadPool* pool, const void* weight, int64_t form, const float* errors, const uint8_t* choices,
    f16* scales, uint8_t* codes, uint8_t* factors, int64_t outputs, int64_t inputs) {
    quantize(*pool, {weight, WeightFormat(form), errors, choices, scales, codes, factors, outputs, inputs});
}

void tgi_linear(ThreadPool* pool, const Element* x, const uint8_t* weight, int64_t form, const float* bias,
    const float* plus,
                const Element* other, Element* y, float* wide, int64_t rows, int64_t inputs, int64_t outputs,
                    int64_t plus_step,
                int64_t epilogue, float first_factor, float second_factor) {
    linear(*pool, {x, {weight, outputs, inputs, WeightFormat(form)}, bias, plus, other, y, wide, rows, plus_step,
        Epilogue(epilogue), {first_factor, second_factor}});
}

void tgi_gather_rows(ThreadPool* pool, const uint8_t* weight, int64_t form, const int64_t* ids, Element* y,
    int64_t count, int64_t inputs, int64_t outputs, int64_t first) {
    gather_rows(*pool, {{weight, outputs, inputs, WeightFormat(form)}, ids, y, count, first});
}

// Bytes of BlockMaxima for each panel of a row.
int64_t tgi_block_maximum_bytes() { return BlockMaxima::BYTES; }

void tgi_argmax(ThreadPool* pool, const float* scores, void* room, int64_t* at, float* highest, float* logprobs,
    int64_t rows,
              int64_t size) {
    argmax(*pool, {scores, BlockMaxima(room, rows, (size + PANEL - 1) / PANEL), {at, highest, logprobs}, rows, size});
}

void tgi_logits(ThreadPool* pool, const Element* x, const uint8_t* weight, int64_t form, const float* bias, float scale,
    float cap,
                int64_t rows, int64_t inputs, int64_t outputs, float* wide) {
    logits(*pool, {x, {weight, outputs, inputs, WeightFormat(form)}, bias, {scale, cap}, rows}, wide);
}

void tgi_greedy_head(ThreadPool* pool, const Element* x, const uint8_t* weight, int64_t form, const float* bias,
    float scale, float cap,
              int64_t rows, int64_t inputs, int64_t outputs, RankGroup* group, const int64_t* shards, int64_t ranks,
                  void* room, int64_t* at, float* highest, float* logprobs) {
    const VocabularyShards all{group, std::vector<int64_t>(shards, shards + ranks)};
    const PackedWeight packed{weight, outputs, inputs, WeightFormat(form)};
    greedy_head(*pool, {x, packed, bias, {scale, cap}, rows, &all}, room, {at, highest, logprobs});
}

void tgi_read_memory(ThreadPool* pool, const void* at, int64_t bytes, int64_t* sum) { *sum = read_memory(*pool, at,
    bytes); }

void tgi_fma_peak(ThreadPool* pool, int64_t chunks, int64_t* operations) { *operations = fma_peak(*pool, chunks); }

void tgi_rope(ThreadPool* pool, Element* x, const float* angles, const int64_t* positions, int64_t tokens, int64_t stride,
              int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t neighbours) {
    rope(*pool, {x, angles, positions, tokens, stride, heads, head_dim, rotary_dim, neighbours != 0});
}

void tgi_head_products(ThreadPool* pool, const Element* x, const Element* last, Element* y,
    const uint8_t* const* weights, int64_t heads, int64_t form, int64_t outputs, int64_t inputs, int64_t kept,
    int64_t rows) {
    head_products(*pool, {x, last, y, weights, {nullptr, outputs, inputs, WeightFormat(form)}, heads, kept, rows});
}

void tgi_write_kv(ThreadPool* pool, void* cache, int64_t form, int64_t kv_heads, int64_t head_dim,
                  const int64_t* slots, int64_t tokens, const Element* pairs) {
    write_kv(*pool, {cache, 0, kv_heads, head_dim, KvForm(form)}, slots, tokens, pairs);
}

void tgi_attention(ThreadPool* pool, void* cache, int64_t form, int64_t heads, int64_t kv_heads, int64_t head_dim,
    int64_t value_dim, const int64_t* slots,
                const int32_t* bounds, const int32_t* contexts, const int32_t* pages, int64_t rows, int64_t width,
                const int32_t* last_keys, int64_t windows_alone,
                const Element* qkv, Element* y, int64_t window, float scale, float softcap, int64_t ahead,
                const float* sinks, int64_t shared, int64_t chunked, const float* slopes) {
    attention(*pool, {cache, heads, kv_heads, head_dim, KvForm(form), value_dim, shared != 0},
           {slots, bounds, contexts, pages, rows, width, last_keys, windows_alone != 0},
           {qkv, y, window, scale, softcap, ahead, sinks, chunked != 0, slopes});
}

void tgi_lora(ThreadPool* pool, const Element* x, float* plus, const int64_t* tokens, const int64_t* tiles,
    const int64_t* owners,
              const LoraPair* const* adapters, const int64_t* bounds, int64_t inputs, int64_t width, int64_t count,
              int64_t parts) {
    lora(*pool, {x, plus, tokens, tiles, owners, adapters, bounds, inputs, width, count, parts});
}

void tgi_norm(ThreadPool* pool, const Element* x, const float* weight, const float* bias, Element* y, int64_t rows,
    int64_t parts,
              int64_t size, int64_t centred, float epsilon) {
    norm(*pool, {x, weight, bias, y, rows, parts * size, parts, size, centred != 0, epsilon});
}

void tgi_causal_conv(ThreadPool* pool, const Element* x, Element* y, Element* window, const float* weight,
    const float* bias, int64_t channels, int64_t kernel, int64_t x_step, int64_t y_step, int64_t form,
    const int32_t* slots, const int32_t* bounds, const int32_t* contexts, int64_t rows, int64_t slot_bytes,
    const int32_t* kept) {
    causal_conv(*pool, {slots, bounds, contexts, rows, slot_bytes, kept},
        {x, y, window, weight, bias, channels, kernel, x_step, y_step, ConvForm(form)});
}

void tgi_sigmoid_gate(ThreadPool* pool, const Element* x, Element* y, int64_t size) { sigmoid_gate(*pool, x, y, size); }

// `sizes`: key_heads, value_heads, key_dim, value_dim, x_step, z_step.
void tgi_delta_rule(ThreadPool* pool, const Element* x, const Element* z, const Element* ba, Element* y, float* state,
    const float* decay, const float* offset, const float* norm, const int64_t* sizes, float epsilon, float most,
    const int32_t* slots, const int32_t* bounds, const int32_t* contexts, int64_t rows, int64_t slot_bytes,
    const int32_t* kept) {
    delta_rule(*pool, {slots, bounds, contexts, rows, slot_bytes, kept},
        {x, z, ba, y, state, decay, offset, norm, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], epsilon,
            most});
}

// `sizes`: heads, groups, head_dim, state_dim, x_step, dt_step.
void tgi_ssd(ThreadPool* pool, const Element* x, const Element* dt, Element* y, float* state, const float* decay,
    const float* offset, const float* skip, const int64_t* sizes, float dt_scale, float least, float most,
    const int32_t* slots, const int32_t* bounds, const int32_t* contexts, int64_t rows, int64_t slot_bytes,
    const int32_t* kept) {
    ssd(*pool, {slots, bounds, contexts, rows, slot_bytes, kept},
        {x, dt, y, state, decay, offset, skip, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], dt_scale,
            least, most});
}

void tgi_gated_norm(ThreadPool* pool, Element* y, const Element* z, const float* weight, int64_t tokens, int64_t groups,
    int64_t size, int64_t z_step, float gate_scale, float epsilon, int64_t form) {
    gated_norm(*pool, {y, z, weight, tokens, groups, size, z_step, gate_scale, epsilon, GatedNormForm(form)});
}

// `rule`: experts, top_k, groups, top_groups, score, normalized, group_best, scales_inputs. `shape`, of an expert and of the shared
// one: inner width, formats of the first and of the last weight, epilogue. The addresses of weights and biases are, for each
// expert,
// up, up's bias, down and down's bias; the same four of the shared expert; of the router and its bias; of the shared
// expert's gate. Missing ones are null.
Experts* tgi_experts(int64_t hidden, const int64_t* rule, float scale, float jitter, const float* choice_bias,
    const float* expert_scales, int64_t router_form, const int64_t* shape, const int64_t* shared_shape,
    int64_t gate_form, const void* const* weights) {
    const auto mlp = [&](const int64_t* shape, const void* const* at) {
        return ExpertMlp{{(const uint8_t*)at[0], shape[0], hidden, WeightFormat(shape[1])},
            {(const uint8_t*)at[2], hidden, shape[0], WeightFormat(shape[2])}, (const float*)at[1],
            (const float*)at[3], Epilogue(shape[3])};
    };
    const void* const* further = weights + 4 * rule[0];
    auto* experts = new Experts{
        {rule[0], rule[1], rule[2], rule[3], RouterScore(rule[4]), rule[5] != 0, scale, choice_bias, rule[6], jitter,
            rule[7] != 0, expert_scales},
        {(const uint8_t*)further[4], rule[0], hidden, WeightFormat(router_form)}, (const float*)further[5],
        mlp(shape, weights), {}, {}, {}, {}, mlp(shared_shape, further),
        {(const uint8_t*)further[6], 1, hidden, WeightFormat(gate_form)}};
    for (const void* const* at = weights; at < further; at += 4) {
        experts->up.push_back((const uint8_t*)at[0]), experts->up_bias.push_back((const float*)at[1]);
        experts->down.push_back((const uint8_t*)at[2]), experts->down_bias.push_back((const float*)at[3]);
    }
    return experts;
}

void tgi_experts_free(Experts* experts) { delete experts; }

void tgi_run_experts(ThreadPool* pool, const Experts* experts, const Element* x, const Element* seen, Element* y,
    int64_t rows) {
    run_experts(*pool, *experts, x, seen, y, rows);
}

int64_t tgi_rank_group_bytes(int64_t ranks) { return RankGroup::shared_bytes(ranks); }

RankGroup* tgi_rank_group(void* memory, int64_t rank, int64_t ranks, int spins) {
    return new RankGroup(memory, rank, ranks, spins);
}

void tgi_rank_group_free(RankGroup* group) { delete group; }

void tgi_all_reduce(RankGroup* group, ThreadPool* pool, Element* x, int64_t size) { group->all_reduce(*pool, x, size); }

void tgi_all_gather(RankGroup* group, const uint8_t* own, int64_t rows, const int64_t* widths, uint8_t* joined) {
    group->all_gather(own, rows, widths, joined);
}

Program* tgi_program(const int64_t* widths, int64_t buffers) {
    return new Program(std::vector<int64_t>(widths, widths + buffers));
}

void tgi_program_free(Program* program) { delete program; }

void tgi_program_norm(Program* program, int64_t x, int64_t y, int64_t from, const float* weight, const float* bias,
                      int64_t parts, int64_t size, int64_t centred, float epsilon) {
    program->norm(x, y, from, {nullptr, weight, bias, nullptr, 0, 0, parts, size, centred != 0, epsilon});
}

void tgi_program_linear(Program* program, int64_t x, int64_t other, int64_t y, int64_t place, int64_t column,
                        const uint8_t* weight, int64_t form, const float* bias, int64_t inputs, int64_t outputs,
                        int64_t epilogue, float first_factor, float second_factor) {
    const PackedWeight packed{weight, outputs, inputs, WeightFormat(form)};
    program->linear(x, other, y, place, column, {nullptr, packed, bias, nullptr, nullptr, nullptr, nullptr, 0, 0,
        Epilogue(epilogue), {first_factor, second_factor}});
}

void tgi_program_lora(Program* program, int64_t x, int64_t place, int64_t layer) { program->lora(x, place, layer); }

void tgi_program_rope(Program* program, int64_t x, int64_t rope, int64_t heads, int64_t head_dim, int64_t rotary_dim,
                      int64_t neighbours, int64_t start) {
    program->rope(x, rope, start, {nullptr, nullptr, nullptr, 0, 0, heads, head_dim, rotary_dim, neighbours != 0});
}

void tgi_program_head_products(Program* program, int64_t x, int64_t last, int64_t y, const uint8_t* const* weights,
    int64_t heads, int64_t form, int64_t outputs, int64_t inputs, int64_t kept) {
    program->head_products(x, last, y,
        {nullptr, nullptr, nullptr, weights, {nullptr, outputs, inputs, WeightFormat(form)}, heads, kept, 0});
}

void tgi_program_attention(Program* program, int64_t qkv, int64_t y, int64_t layer, int64_t heads, int64_t kv_heads,
                        int64_t head_dim, int64_t value_dim, int64_t window, float scale, float softcap,
                        const float* sinks, int64_t shared, int64_t chunked, const float* slopes) {
    program->attention(qkv, y, layer, {nullptr, heads, kv_heads, head_dim, KvForm::ELEMENT, value_dim, shared != 0},
        {nullptr, nullptr, window, scale, softcap, 0, sinks, chunked != 0, slopes});
}

void tgi_program_conv(Program* program, int64_t x, int64_t y, int64_t window, const float* weight, const float* bias,
                      int64_t channels, int64_t kernel, int64_t form) {
    program->conv(x, y, window, {nullptr, nullptr, nullptr, weight, bias, channels, kernel, 0, 0, ConvForm(form)});
}

void tgi_program_delta_rule(Program* program, int64_t x, int64_t ba, int64_t y, int64_t z, int64_t state,
                            const float* decay, const float* offset, const float* norm, int64_t key_heads,
                                int64_t value_heads, int64_t key_dim, int64_t value_dim, float epsilon, float most) {
    program->delta_rule(x, ba, y, z, state, {nullptr, nullptr, nullptr, nullptr, nullptr, decay, offset, norm,
        key_heads, value_heads, key_dim, value_dim, 0, 0, epsilon, most});
}

void tgi_program_ssd(Program* program, int64_t x, int64_t dt, int64_t y, int64_t state, const float* decay,
                     const float* offset, const float* skip, int64_t heads, int64_t groups, int64_t head_dim,
                         int64_t state_dim, float dt_scale, float least, float most) {
    program->ssd(x, dt, y, state, {nullptr, nullptr, nullptr, nullptr, decay, offset, skip, heads, groups, head_dim,
        state_dim, 0, 0, dt_scale, least, most});
}

void tgi_program_gated_norm(Program* program, int64_t y, int64_t x, int64_t z, const float* weight, int64_t groups,
                            int64_t size, float gate_scale, float epsilon, int64_t form) {
    program->gated_norm(y, x, z, {nullptr, nullptr, weight, 0, groups, size, 0, gate_scale, epsilon,
        GatedNormForm(form)});
}

void tgi_program_sigmoid_gate(Program* program, int64_t x, int64_t y) { program->sigmoid_gate(x, y); }

void tgi_program_experts(Program* program, int64_t x, int64_t seen, int64_t y, const Experts* experts) {
    program->experts(x, seen, y, *experts);
}

void tgi_program_add(Program* program, int64_t x, int64_t y, float scale) { program->add(x, y, scale); }

void tgi_program_scale(Program* program, int64_t y, float scale) { program->scale(y, scale); }

void tgi_program_multiply(Program* program, int64_t x, int64_t y, int64_t from) { program->multiply(x, y, from); }

void tgi_program_copy(Program* program, int64_t x, int64_t y, int64_t from) { program->copy(x, y, from); }

void tgi_program_all_reduce(Program* program, int64_t x, RankGroup* group) { program->all_reduce(x, *group); }

void tgi_program_attend_images(Program* program, int64_t queries, int64_t y, int64_t layer, int64_t heads,
                               int64_t kv_heads, int64_t head_dim, float scale) {
    program->attend_images(queries, y, layer, {nullptr, heads, kv_heads, head_dim, KvForm::ELEMENT, 0, true},
        {nullptr, nullptr, 0, scale, 0});
}

void tgi_program_copy_unseeing(Program* program, int64_t x, int64_t y) { program->copy_unseeing(x, y); }

void tgi_program_add_features(Program* program, int64_t y, int64_t level) { program->add_features(y, level); }

void tgi_program_head(Program* program, int64_t x, int64_t y, const float* scales, const float* shifts, int64_t size,
                      int64_t centred, float epsilon, const uint8_t* weight, int64_t form, const float* bias,
                          int64_t outputs, float scale, float cap, RankGroup* group, const int64_t* shards,
                              int64_t ranks) {
    const PackedWeight packed{weight, outputs, size, WeightFormat(form)};
    program->head(x, y, {nullptr, scales, shifts, nullptr, 0, 0, 1, size, centred != 0, epsilon},
                  {nullptr, packed, bias, {scale, cap}, 0}, {group, std::vector<int64_t>(shards, shards + ranks)});
}

void tgi_program_run(Program* program, ThreadPool* pool, Element* rows, const int64_t* positions,
    const float* const* angles,
                     const LayerCache* caches, int64_t kv_form, const LoraStep* lora_step, const int64_t* slots, const int32_t* bounds,
                     const int32_t* contexts, const int32_t* pages, int64_t count, int64_t width,
                     const int32_t* last_keys, int64_t windows_alone,
                         const GreedyRows* greedy_rows, const StateStep* state, Element* side,
                     const ImageStep* images, double* clock) {
    const AttentionBatch step{slots, bounds, contexts, pages, count, width, last_keys, windows_alone != 0};
    program->run(*pool, {rows, positions, angles, caches, KvForm(kv_form), lora_step, greedy_rows, step, state, side,
        images}, clock);
}
}
#pragma GCC visibility pop
