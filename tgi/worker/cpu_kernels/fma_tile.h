// The FMA engine: products of tiles in float32, up to 32 rows times a block of 32 columns, on every instruction set.
//
// c[r][n] = sum over k of a[r][k] * b[k][n]. Rows of `a` are float32 and contiguous in k. `b` holds bfloat16, float16
// or float32 numbers in the order of `element_index`, or codes that a decoder turns into float32 (fma_decoders.h).
//
// Invariant: every sum is one chain of fused multiply-adds over ascending k, whatever the number of rows, and whether at
// once or in parts. So a row's result does not depend on the other rows.
#pragma once
#include <algorithm>
#include <type_traits>

#include "prefetch.h"
#include "row_count.h"
#include "simd.h"

namespace tgi {

constexpr int64_t COLUMNS = 32;  // of a block
constexpr int64_t MAX_TILE_ROWS = 32;  // rows of a tile, for callers that hold the sums of one

#if defined(__AVX512F__)
constexpr int64_t FMA_ROWS = 8;  // rows whose sums fit the registers, with 32 columns
constexpr int64_t WIDE_FMA_ROWS = 8;
#else
constexpr int64_t FMA_ROWS = 6;  // rows whose sums fit the registers, with 16 columns,
constexpr int64_t WIDE_FMA_ROWS = 3;  // and with 32
#endif

// The next 32 inputs of b. `step` is the number of elements from one pair of inputs to the next, `right` from the first
// 16 columns to the other 16. Decoders specialize this.
template <class B>
struct FmaBlock {
    FmaBlock() = default;
    TGI_INLINE explicit FmaBlock(B& b) : at(b.next_block()), step(b.step), right(b.right) {}

    // Input 2 j or 2 j + 1 of the first (0) or the other (1) 16 columns.
    template <int which>
    TGI_INLINE Float input(int j, int half) const {
        return load_input<which>(at + j * step + half * right, step / 2);
    }

    decltype(std::declval<B&>().next_block()) at;
    int64_t step, right;
};

// Adds the inputs 2 j and 2 j + 1 of V times 16 columns to the sums of R rows; x: the rows' inputs.
template <int R, int V, class Block>
TGI_INLINE void fma_pair(const float* x, int64_t step, const Block& block, int j, int half, Float (&sums)[R][V]) {
    const auto add_input = [&](Float column, int v, int input) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r][v] = fma(broadcast(x[r * step + input]), column, sums[r][v]);
    };
    // Columns are loaded just before their use: with AVX2 the sums take 12 of 16 registers.
#if defined(__AVX512F__)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) add_input(block.template input<0>(j, half + v), v, 0);
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) add_input(block.template input<1>(j, half + v), v, 1);
#else
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
        add_input(block.template input<0>(j, half + v), v, 0);
        add_input(block.template input<1>(j, half + v), v, 1);
    }
#endif
}

// Bytes of a pair of inputs of a block, if those of later blocks have to be prefetched, else 0.
template <class Block>
constexpr int64_t PREFETCHED = 0;

// Prefetches pair j of a later block. One pair at a time, between the loads of others, is up to an eighth faster than a
// block at once, which fills the core's buffers.
template <class Block>
TGI_INLINE void prefetch_pair(const Block& block, int j) {
    constexpr int64_t BYTES = PREFETCHED<Block>;
    if (BYTES >= CACHE_LINE || (BYTES && j % 2 == 0))
#pragma GCC unroll 4
        for (int64_t line = 0; line < BYTES; line += CACHE_LINE)
            prefetch_l1((const uint8_t*)block.at + PREFETCH_DISTANCE + j * BYTES + line);
}

// Adds `count` pairs of inputs from pair `first` on, an even one.
template <int count, int R, int V, class Block>
TGI_INLINE void fma_pairs(const float* x, int64_t step, const Block& block, int first, int half, Float (&sums)[R][V]) {
#pragma GCC unroll 2
    for (int n = 0; n < count; n++) {
        const int j = first + n;
        prefetch_pair(block, j);
        fma_pair(x + 2 * j, step, block, j, half, sums);
    }
}

// Reads or clears the sums of R rows times V times 16 columns.
template <int R, int V>
TGI_INLINE void begin_sums(bool add, const float* c, int64_t c_step, Float (&sums)[R][V]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[r][v] = add ? load(c + r * c_step + LANES * v) : zeros();
}

// The sums of R rows times V times 16 columns, from column 16 * half on, of P blocks of columns in alternation; the sums
// of the second block follow those of the first. Not inlined, since it needs all registers.
template <bool add, int R, int V, int P, class B>
__attribute__((noinline)) void fma_rows(const float* a, int64_t a_step, B* b, int half, int64_t depth, float* c,
    int64_t c_step) {
    Float sums[P][R][V];
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) begin_sums(add, c + p * R * c_step, c_step, sums[p]);
    for (int64_t k = 0; k < depth; k += 32) {
        FmaBlock<B> blocks[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) blocks[p] = FmaBlock<B>(b[p]);
#pragma GCC unroll 2
        for (int j = 0; j < 16; j++)
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                prefetch_pair(blocks[p], j);
                fma_pair(a + k + 2 * j, a_step, blocks[p], j, half, sums[p]);
            }
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; p++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) store(c + (p * R + r) * c_step + LANES * v, sums[p][r][v]);
}

template <bool add, int R, class B>
inline void fma_rows(const float* a, int64_t a_step, B& b, int64_t depth, float* c, int64_t c_step) {
    if constexpr (R <= WIDE_FMA_ROWS) return fma_rows<add, R, 2, 1>(a, a_step, &b, 0, depth, c, c_step);
    else {
        B again = b;
        fma_rows<add, R, 1, 1>(a, a_step, &b, 0, depth, c, c_step);
        fma_rows<add, R, 1, 1>(a, a_step, &again, 1, depth, c + LANES, c_step);
    }
}

// Up to FMA_ROWS rows.
template <bool add, class B>
inline void fma_few_rows(const float* a, int64_t a_step, int64_t rows, B& b, int64_t depth, float* c, int64_t c_step) {
    with_row_count<FMA_ROWS>(rows, [&](auto count) { fma_rows<add, count>(a, a_step, b, depth, c, c_step); });
}

// One row times two blocks of columns, which keeps twice as many multiply-adds going; c is [2][32].
template <class B>
inline void fma_two_blocks(const float* a, B (&b)[2], int64_t depth, float* c) {
    fma_rows<false, 1, 2, 2>(a, 0, b, 0, depth, c, COLUMNS);
}

// Any number of rows. `depth` is a multiple of 32, b a type with `next_block`, `step` and `right`, or a decoder. `add`:
// adds to the contents of c [rows][c_step].
template <bool add = false, class B>
inline void tile_matmul(const float* a, int64_t a_step, int64_t rows, B&& b, int64_t depth, float* c, int64_t c_step) {
    using Columns = std::remove_const_t<std::remove_reference_t<B>>;
    for (int64_t row = 0; row < rows; row += FMA_ROWS) {
        Columns columns = b;
        fma_few_rows<add>(a + row * a_step, a_step, std::min(rows - row, FMA_ROWS), columns, depth, c + row * c_step,
            c_step);
    }
}

// 32 of `columns` columns that are stored interleaved, in the order of `element_index`.
template <class T>
struct InterleavedColumns {
    const T* next_block() {
        const T* found = at;
        at += 16 * step;
        return found;
    }

    const T* at;
    int64_t step;  // from one pair of inputs to the next
    int64_t right = IS_PAIRED<T> ? 32 : 16;
};

// The same for columns that are stored interleaved with others.
template <bool add = false, class T>
inline void tile_matmul(const float* a, int64_t a_step, int64_t rows, const T* b, int64_t columns, int64_t depth,
    float* c, int64_t c_step) {
    tile_matmul<add>(a, a_step, rows, InterleavedColumns<T>{b, 2 * columns}, depth, c, c_step);
}

// The dot engine's tiles have to be configured before products; here there are none.
inline void configure_tiles(int64_t) {}

}  // namespace tgi
