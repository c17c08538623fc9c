// Decode steps of llama.cpp, for scripts/benchmarks/architectures.py.
//
//     llama-decode MODEL.gguf ROWS TOKENS    up to ROWS rows of up to TOKENS tokens
//
// Each line of the input is "flash threads rows prompt steps", followed by the prompt + steps token ids of each row.
// With flash attention or without it, computes these prompts and then steps of one token for each row, all rows
// in one batch, and prints the seconds that the steps took and the CPU time of all threads. Tokens are not sampled.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <vector>

#include "llama.h"

static void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

// Computes `count` tokens of each row from `position` on, of which the last ones have logits. Row r has the ids from
// r * width on.
static bool compute(llama_context * context, const std::vector<int> & ids, int width, int position, int count) {
    llama_batch batch = llama_batch_init(int(ids.size()) / width * count, 0, 1);
    for (int row = 0; row * width < int(ids.size()); row++) {
        for (int i = 0; i < count; i++) {
            const int at = batch.n_tokens++;
            batch.token[at] = ids[row * width + position + i];
            batch.pos[at] = position + i;
            batch.n_seq_id[at] = 1;
            batch.seq_id[at][0] = row;
            batch.logits[at] = i == count - 1;
        }
    }
    const bool computed = llama_decode(context, batch) == 0;
    llama_synchronize(context);
    llama_batch_free(batch);
    return computed;
}

int main(int count, char ** words) {
    if (count != 4) {
        return 2;
    }
    llama_log_set(only_errors, nullptr);
    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers = 0;
    // In memory of its own: then the weights can have huge pages, and other programs cannot push them out of it.
    of_model.load_mode = LLAMA_LOAD_MODE_NONE;
    llama_model * model = llama_model_load_from_file(words[1], of_model);
    if (model == nullptr) {
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_seq_max = atoi(words[2]);
    params.n_ctx = params.n_batch = params.n_seq_max * atoi(words[3]);
    // A decode step is one batch; longer prompts are divided.
    params.n_ubatch = std::max(params.n_ubatch, params.n_seq_max);
    params.no_perf = true;
    llama_context * contexts[2];
    for (int flash = 0; flash < 2; flash++) {
        params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        contexts[flash] = llama_init_from_model(model, params);
        if (contexts[flash] == nullptr) {
            return 1;
        }
    }
    for (int flash, threads, rows, prompt, steps; std::cin >> flash >> threads >> rows >> prompt >> steps;) {
        std::vector<int> ids(rows * (prompt + steps));
        for (int & id : ids) {
            std::cin >> id;
        }
        llama_context * context = contexts[flash != 0];
        llama_set_n_threads(context, threads, threads);
        llama_memory_clear(llama_get_memory(context), true);
        if (!compute(context, ids, prompt + steps, 0, prompt)) {
            return 1;
        }
        const auto began = std::chrono::steady_clock::now();
        const clock_t used = clock();
        for (int step = 0; step < steps; step++) {
            if (!compute(context, ids, prompt + steps, prompt + step, 1)) {
                return 1;
            }
        }
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        printf("%.6f %.6f\n", seconds, double(clock() - used) / CLOCKS_PER_SEC);
        fflush(stdout);
    }
}
