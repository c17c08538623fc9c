// What Python calls, with numbers and addresses alone.
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "norm.h"
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

void tgi_pack(Team* team, const bf16* weight, int64_t outputs, int64_t inputs, uint8_t* packed) {
    pack(*team, weight, {packed, outputs, inputs, Form(16)});
}

void tgi_pack_quantized(Team* team, const uint8_t* codes, const uint16_t* scales, const uint16_t* shifts, int64_t outputs,
                        int64_t inputs, int64_t form, uint8_t* packed) {
    pack_quantized(*team, codes, scales, shifts, {packed, outputs, inputs, Form(form)});
}

void tgi_linear(Team* team, const bf16* x, const uint8_t* weight, int64_t form, const float* bias, const float* plus,
                const bf16* other, bf16* y, float* wide, int64_t rows, int64_t inputs, int64_t outputs, int64_t plus_step,
                int64_t then) {
    linear(*team, {x, {weight, outputs, inputs, Form(form)}, bias, plus, other, y, wide, rows, plus_step, Then(then)});
}

void tgi_turn(Team* team, bf16* x, const float* cos, const float* sin, int64_t tokens, int64_t stride, int64_t heads,
              int64_t head_dim, int64_t turned, int64_t neighbours) {
    turn(*team, {x, cos, sin, tokens, stride, heads, head_dim, turned, neighbours != 0});
}

void tgi_attend(Team* team, bf16* cache, int64_t heads, int64_t kv_heads, int64_t head_dim, const int64_t* places,
                const int64_t* bounds, const int64_t* contexts, const int32_t* pages, int64_t rows, int64_t width,
                const bf16* qkv, bf16* y, int64_t window, float scale, float softcap) {
    attend(*team, {cache, heads, kv_heads, head_dim}, {places, bounds, contexts, pages, rows, width},
           {qkv, y, window, scale, softcap});
}

void tgi_lora(Team* team, const bf16* x, float* plus, const int64_t* tokens, const int64_t* tiles, const int64_t* owners,
              const Pair* const* adapters, const int64_t* bounds, int64_t inputs, int64_t width, int64_t count,
              int64_t parts) {
    lora(*team, {x, plus, tokens, tiles, owners, adapters, bounds, inputs, width, count, parts});
}

void tgi_norm(Team* team, const bf16* x, const float* weight, const float* bias, bf16* y, int64_t rows, int64_t size,
              int64_t centred, float epsilon) {
    norm(*team, {x, weight, bias, y, rows, size, centred != 0, epsilon});
}
}
