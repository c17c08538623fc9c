// Decode steps of llama.cpp, for scripts/benchmarks/architectures.py.
//
//     llama-decode MODEL.gguf ROWS TOKENS THREADS    up to ROWS rows of up to TOKENS tokens
//
// Each line of the input is "rows prompt steps": computes that many prompts, which differ, and then steps of one token
// for each row, and prints the seconds that the steps took and the CPU time of all threads. Tokens are not sampled.

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

// Computes `count` tokens of each row from `position` on, of which the last ones have logits.
static bool compute(llama_context * context, int vocabulary, int rows, int position, int count) {
    llama_batch batch = llama_batch_init(rows * count, 0, 1);
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < count; i++) {
            const int at = batch.n_tokens++;
            batch.token[at] = rand() % vocabulary;
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
    if (count != 5) {
        return 2;
    }
    llama_log_set(only_errors, nullptr);
    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(words[1], of_model);
    if (model == nullptr) {
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_seq_max = atoi(words[2]);
    params.n_ctx = params.n_batch = params.n_seq_max * atoi(words[3]);
    params.n_threads = params.n_threads_batch = atoi(words[4]);
    params.no_perf = true;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        return 1;
    }
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int rows, prompt, steps; std::cin >> rows >> prompt >> steps;) {
        llama_memory_clear(llama_get_memory(context), true);
        if (!compute(context, vocabulary, rows, 0, prompt)) {
            return 1;
        }
        const auto began = std::chrono::steady_clock::now();
        const clock_t used = clock();
        for (int step = 0; step < steps; step++) {
            if (!compute(context, vocabulary, rows, prompt + step, 1)) {
                return 1;
            }
        }
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        printf("%.6f %.6f\n", seconds, double(clock() - used) / CLOCKS_PER_SEC);
        fflush(stdout);
    }
}
