// A convolution over the last tokens of a sequence, each channel by itself, whose earlier inputs are in a slot of state.
#pragma once
#include <cstdint>

#include "elements.h"
#include "thread_pool.h"

namespace tgi {

// The rows (sequences) of a step and the slots of their state.
struct StateRows {
    // Whether nothing came before this step: the state is zeros, whatever the slot holds.
    bool starts(int64_t row) const { return contexts[row] == bounds[row + 1] - bounds[row]; }

    // The state of a row, from its address in slot 0.
    template <class T>
    T* state(T* first, int64_t row) const {
        return (T*)((uint8_t*)first + slots[row] * slot_bytes);
    }

    // The state in the slot that keeps it as it is after this token, from its address in slot 0; null: none does.
    template <class T>
    T* kept_state(T* first, int64_t token) const {
        return kept && kept[token] ? (T*)((uint8_t*)first + kept[token] * slot_bytes) : nullptr;
    }

    const int32_t* slots;  // [rows]
    const int32_t* bounds;  // [rows + 1]: the tokens of row r are bounds[r] .. bounds[r + 1] - 1
    const int32_t* contexts;  // [rows] tokens of each sequence, those of this step included
    int64_t rows;
    int64_t slot_bytes;  // from one slot to the next
    const int32_t* kept;  // [tokens] the slot that keeps the state after each token; 0: none; null: none of all
};

// What is convolved and what becomes of it.
enum class ConvForm : int64_t {
    PLAIN,  // silu(conv(x))
    GATED,  // c * conv(b * u), where a row of x has all b, then all c, then all u; b * u is rounded
};

struct ConvCall {
    const Element* x;  // [tokens, x_step]
    Element* y;  // [tokens, y_step]; may be x
    Element* window;  // in slot 0, [kernel - 1, channels]: the last inputs, the oldest first
    const float* weight;  // [kernel, channels], for the oldest input first
    const float* bias;  // [channels], or null
    int64_t channels, kernel, x_step, y_step;  // kernel <= MAX_CONV_KERNEL
    ConvForm form;
};

constexpr int64_t MAX_CONV_KERNEL = 8;

void causal_conv(ThreadPool& pool, const StateRows& rows, const ConvCall& call);

}  // namespace tgi
