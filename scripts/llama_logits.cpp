// llama.cpp's logits and greedy tokens, for scripts/check_gguf.py.
//
//     llama-logits logits MODEL.gguf OUT COUNT < ids     computes the ids as one prompt, then COUNT tokens greedily;
//         writes the float32 logits [ids + COUNT, vocabulary] to OUT, and prints the greedy ids
//     llama-logits vector MODEL.gguf OUT SIZE < ids      computes the ids as one text, and writes its vector, SIZE
//         float32 numbers, to OUT, as the file pools, or with a head of SIZE classes their logits
//     llama-logits tokens MODEL.gguf TEXT 0              prints the ids of the text in that file
//     llama-logits quantize MODEL.gguf OUT 15            writes the file in Q4_K_M, the type of that number
//
// Keys, values and recurrent states are float32, attention is exact (no flash attention), and one thread computes.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

static void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static int quantize(const char * source, const char * target, int type) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.nthread = 1;
    params.ftype = (llama_ftype) type;
    return (int) llama_model_quantize(source, target, &params);
}

static llama_model * load(const char * source) {
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers = 0;
    return llama_model_load_from_file(source, of_model);
}

static std::vector<llama_token> given_ids() {
    std::vector<llama_token> ids;
    for (llama_token id; std::cin >> id;) {
        ids.push_back(id);
    }
    return ids;
}

static int tokens(const char * source, const char * target) {
    llama_model * model = load(source);
    std::ifstream file(target, std::ios::binary);
    if (model == nullptr || !file) {
        return 1;
    }
    std::stringstream text;
    text << file.rdbuf();
    std::vector<llama_token> ids(text.str().size() + 16);
    const int count = llama_tokenize(
        llama_model_get_vocab(model), text.str().c_str(), text.str().size(), ids.data(), ids.size(), true, true);
    for (int i = 0; i < count; i++) {
        printf("%d\n", ids[i]);
    }
    return count < 0;
}

static int vector(const char * source, const char * target, int size) {
    llama_model * model = load(source);
    if (model == nullptr) {
        return 1;
    }
    const std::vector<llama_token> ids = given_ids();
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = ids.size();
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.embeddings = true;
    if (size != llama_model_n_embd_out(model)) {
        params.pooling_type = LLAMA_POOLING_TYPE_RANK;
    }
    llama_context * context = llama_init_from_model(model, params);
    FILE * out = fopen(target, "wb");
    if (context == nullptr || out == nullptr) {
        return 1;
    }
    llama_batch batch = llama_batch_init(ids.size(), 0, 1);
    batch.n_tokens = ids.size();
    for (int i = 0; i < batch.n_tokens; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch) != 0) {
        return 1;
    }
    const float * found = llama_get_embeddings_seq(context, 0);
    if (found == nullptr || fwrite(found, sizeof(float), size, out) != (size_t) size) {
        return 1;
    }
    return fclose(out);
}

static int logits(const char * source, const char * target, int count) {
    llama_model * model = load(source);
    if (model == nullptr) {
        return 1;
    }
    std::vector<llama_token> step = given_ids();
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = step.size() + count;
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.swa_full = true;
    params.no_perf = true;
    llama_context * context = llama_init_from_model(model, params);
    FILE * out = fopen(target, "wb");
    if (context == nullptr || out == nullptr) {
        return 1;
    }
    int position = 0;
    for (int made = 0;; made++) {
        llama_batch batch = llama_batch_init(step.size(), 0, 1);
        batch.n_tokens = step.size();
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = step[i];
            batch.pos[i] = position++;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch) != 0) {
            return 1;
        }
        const float * last = nullptr;
        for (int i = 0; i < batch.n_tokens; i++) {
            last = llama_get_logits_ith(context, i);
            if (fwrite(last, sizeof(float), vocabulary, out) != (size_t) vocabulary) {
                return 1;
            }
        }
        llama_batch_free(batch);
        if (made == count) {
            return fclose(out);
        }
        step = {(llama_token) (std::max_element(last, last + vocabulary) - last)};
        printf("%d\n", step[0]);
    }
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s logits|vector|tokens|quantize MODEL.gguf OUT|TEXT COUNT|SIZE|TYPE\n", argv[0]);
        return 2;
    }
    llama_log_set(only_errors, nullptr);
    llama_backend_init();
    const std::string what = argv[1];
    const int number = atoi(argv[4]);
    return what == "quantize" ? quantize(argv[2], argv[3], number)
           : what == "tokens" ? tokens(argv[2], argv[3])
           : what == "vector" ? vector(argv[2], argv[3], number)
                              : logits(argv[2], argv[3], number);
}
