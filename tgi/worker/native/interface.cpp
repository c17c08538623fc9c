// What Python calls, with numbers and addresses alone.
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "best.h"
#include "head.h"
#include "linear.h"
#include "lora.h"
#include "norm.h"
#include "program.h"
#include "quantize.h"
#include "read.h"
#include "rows.h"
#include "team.h"
#include "turn.h"

using namespace tgi;

extern "C" {

// Makes a team. Null if the system does not let this process use what the library was compiled for.
Team* tgi_start(int threads, int spins) {
#if defined(__AMX_BF16__)
    constexpr int request_permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return nullptr;
#endif
    return new Team(threads, spins);
}

void tgi_stop(Team* team) { delete team; }

void tgi_pack(Team* team, const bf16* weight, int64_t outputs, int64_t inputs, int64_t form, uint8_t* packed, int64_t which) {
    pack(*team, weight, {packed, outputs, inputs, Form(form)}, which);
}

void tgi_pack_quantized(Team* team, const uint8_t* codes, const uint16_t* scales, const uint16_t* shifts, int64_t outputs,
                        int64_t inputs, int64_t form, uint8_t* packed, int64_t which) {
    pack_quantized(*team, codes, scales, shifts, {packed, outputs, inputs, Form(form)}, which);
}

// Bytes of a weight that is packed.
int64_t tgi_packed_bytes(int64_t outputs, int64_t inputs, int64_t form) {
    return Packed{nullptr, outputs, inputs, Form(form)}.bytes();
}

void tgi_pack_whole(Team* team, const uint8_t* codes, const uint16_t* scales, const uint8_t* factors, const int8_t* table,
                    int64_t outputs, int64_t inputs, int64_t form, uint8_t* packed, int64_t which) {
    pack_whole(*team, codes, scales, factors, table, {packed, outputs, inputs, Form(form)}, which);
}

void tgi_quantize(Team* team, const bf16* weight, const float* errors, const uint8_t* choices, uint16_t* scales,
                  uint8_t* codes, uint8_t* factors, int64_t outputs, int64_t inputs) {
    quantize(*team, {weight, errors, choices, scales, codes, factors, outputs, inputs});
}

void tgi_linear(Team* team, const bf16* x, const uint8_t* weight, int64_t form, const float* bias, const float* plus,
                const bf16* other, bf16* y, float* wide, int64_t rows, int64_t inputs, int64_t outputs, int64_t plus_step,
                int64_t then) {
    linear(*team, {x, {weight, outputs, inputs, Form(form)}, bias, plus, other, y, wide, rows, plus_step, Then(then)});
}

void tgi_rows(Team* team, const uint8_t* weight, int64_t form, const int64_t* ids, bf16* y, int64_t count, int64_t inputs,
              int64_t outputs) {
    rows(*team, {{weight, outputs, inputs, Form(form)}, ids, y, count});
}

// Of the room that finding the best takes, for each panel of a row.
int64_t tgi_peak_bytes() { return Peaks::BYTES; }

void tgi_best(Team* team, const float* scores, void* room, int64_t* at, float* highest, float* logprobs, int64_t rows,
              int64_t size) {
    best(*team, {scores, Peaks(room, rows, (size + PANEL - 1) / PANEL), {at, highest, logprobs}, rows, size});
}

void tgi_scores(Team* team, const bf16* x, const uint8_t* weight, int64_t form, const float* bias, float scale, float cap,
                int64_t rows, int64_t inputs, int64_t outputs, float* wide) {
    scores(*team, {x, {weight, outputs, inputs, Form(form)}, bias, {scale, cap}, rows}, wide);
}

void tgi_head(Team* team, const bf16* x, const uint8_t* weight, int64_t form, const float* bias, float scale, float cap,
              int64_t rows, int64_t inputs, int64_t outputs, void* room, int64_t* at, float* highest, float* logprobs) {
    const Packed packed{weight, outputs, inputs, Form(form)};
    head(*team, {x, packed, bias, {scale, cap}, rows}, Peaks(room, rows, packed.panels()), {at, highest, logprobs});
}

void tgi_read(Team* team, const void* at, int64_t bytes, int64_t* sum) { *sum = read(*team, at, bytes); }

void tgi_turn(Team* team, bf16* x, const float* angles, const int64_t* positions, int64_t tokens, int64_t stride,
              int64_t heads, int64_t head_dim, int64_t turned, int64_t neighbours) {
    turn(*team, {x, angles, positions, tokens, stride, heads, head_dim, turned, neighbours != 0});
}

void tgi_attend(Team* team, bf16* cache, int64_t heads, int64_t kv_heads, int64_t head_dim, const int64_t* places,
                const int32_t* bounds, const int32_t* contexts, const int32_t* pages, int64_t rows, int64_t width,
                const bf16* qkv, bf16* y, int64_t window, float scale, float softcap) {
    attend(*team, {cache, heads, kv_heads, head_dim}, {places, bounds, contexts, pages, rows, width},
           {qkv, y, window, scale, softcap});
}

void tgi_lora(Team* team, const bf16* x, float* plus, const int64_t* tokens, const int64_t* tiles, const int64_t* owners,
              const Pair* const* adapters, const int64_t* bounds, int64_t inputs, int64_t width, int64_t count,
              int64_t parts) {
    lora(*team, {x, plus, tokens, tiles, owners, adapters, bounds, inputs, width, count, parts});
}

void tgi_norm(Team* team, const bf16* x, const float* weight, const float* bias, bf16* y, int64_t rows, int64_t parts,
              int64_t size, int64_t centred, float epsilon) {
    norm(*team, {x, weight, bias, y, rows, parts * size, parts, size, centred != 0, epsilon});
}

Program* tgi_program(const int64_t* widths, int64_t buffers) {
    return new Program(std::vector<int64_t>(widths, widths + buffers));
}

void tgi_program_end(Program* program) { delete program; }

void tgi_program_norm(Program* program, int64_t x, int64_t y, int64_t from, const float* weight, const float* bias,
                      int64_t parts, int64_t size, int64_t centred, float epsilon) {
    program->norm(x, y, from, {nullptr, weight, bias, nullptr, 0, 0, parts, size, centred != 0, epsilon});
}

void tgi_program_linear(Program* program, int64_t x, int64_t other, int64_t y, int64_t place, int64_t column,
                        const uint8_t* weight, int64_t form, const float* bias, int64_t inputs, int64_t outputs,
                        int64_t then) {
    const Packed packed{weight, outputs, inputs, Form(form)};
    program->linear(x, other, y, place, column, {nullptr, packed, bias, nullptr, nullptr, nullptr, nullptr, 0, 0, Then(then)});
}

void tgi_program_lora(Program* program, int64_t x, int64_t place, int64_t layer) { program->lora(x, place, layer); }

void tgi_program_turn(Program* program, int64_t x, int64_t rope, int64_t heads, int64_t head_dim, int64_t turned,
                      int64_t neighbours) {
    program->turn(x, rope, {nullptr, nullptr, nullptr, 0, 0, heads, head_dim, turned, neighbours != 0});
}

void tgi_program_attend(Program* program, int64_t qkv, int64_t y, int64_t layer, int64_t heads, int64_t kv_heads,
                        int64_t head_dim, int64_t window, float scale, float softcap) {
    program->attend(qkv, y, layer, {nullptr, heads, kv_heads, head_dim}, {nullptr, nullptr, window, scale, softcap});
}

void tgi_program_add(Program* program, int64_t x, int64_t y, float scale) { program->add(x, y, scale); }

void tgi_program_head(Program* program, int64_t x, int64_t y, const float* scales, const float* shifts, int64_t size,
                      int64_t centred, float epsilon, const uint8_t* weight, int64_t form, const float* bias, int64_t outputs,
                      float scale, float cap) {
    const Packed packed{weight, outputs, size, Form(form)};
    program->head(x, y, {nullptr, scales, shifts, nullptr, 0, 0, 1, size, centred != 0, epsilon},
                  {nullptr, packed, bias, {scale, cap}, 0});
}

void tgi_program_run(Program* program, Team* team, bf16* rows, const int64_t* positions, const float* const* angles,
                     bf16* const* caches, const Adapted* adapted, const int64_t* places, const int32_t* bounds,
                     const int32_t* contexts, const int32_t* pages, int64_t count, int64_t width, const Drawing* drawing,
                     double* clock) {
    const Step step{places, bounds, contexts, pages, count, width};
    program->run(*team, {rows, positions, angles, caches, adapted, drawing, step}, clock);
}
}
