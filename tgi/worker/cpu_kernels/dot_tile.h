// The dot engine: products of tiles in bfloat16 or bytes with AMX or with dot products in vectors (simd.h), up to 32
// rows times a block of 32 columns.
//
// c[r][n] = sum over k of a[r][k] * b[k][n]. Rows of `a` are contiguous in k. `b` holds the pairs b[2 j][n], b[2 j +
// 1][n] next to each other, the layout that both AMX tiles and dot products of pairs take. Either a and b are bfloat16
// and sums float32, or two bytes take the place of each number and sums are int32, which are exact.
//
// Invariant: every row is summed over k in one order, whatever the number of rows, and whether at once or in parts of
// multiples of 32. So a row's result does not depend on the other rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "prefetch.h"
#include "row_count.h"
#include "simd.h"

namespace tgi {

// 16 sums, of dot products of pairs of bfloat16; or of four bytes in place of each pair, those of a unsigned and those
// of b signed.
template <class Sum>
using SumVector = std::conditional_t<std::is_same_v<Sum, float>, Float, Int>;

// The next 32 inputs of b as rows of pairs: of the first 16 columns, and of the other 16.
template <class B>
struct ColumnBlock {
    TGI_INLINE explicit ColumnBlock(B& b) : at(b.next_block()), step(b.step), right(b.right) {}
    TGI_INLINE Int first(int row) const { return load((const int32_t*)(at + row * step)); }
    TGI_INLINE Int second(int row) const { return load((const int32_t*)(at + row * step + right)); }

    const bf16* at;
    const int64_t step, right;
};

// The sums of M rows times one block of columns, or times several blocks in alternation. The sums of each further block
// are stored 16 rows below those of the block before. Not inlined, since it needs all registers.
template <bool add, int M, class Sum, class... B>
__attribute__((noinline)) void dot_rows(const bf16* a, int64_t a_step, int64_t depth, Sum* c, int64_t c_step, B&... b) {
    constexpr int N = sizeof...(b);
    SumVector<Sum> sums[N][M][2];
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++)
                sums[n][m][half] = add ? load(c + (16 * n + m) * c_step + 16 * half) : SumVector<Sum>{};
    for (int64_t k = 0; k < depth; k += 32) {
        const auto add_row = [&](auto j, const auto& pairs, const auto& block, int row, auto& found) TGI_INLINE_LAMBDA {
            const Int first = block.first(row + j);
            if (REGISTERS > 1) {  // there are no registers for columns that are not needed yet
                for (int m = 0; m < M; m++) found[m][0] = dot<j>(found[m][0], pairs[m], first);
                const Int second = block.second(row + j);
                for (int m = 0; m < M; m++) found[m][1] = dot<j>(found[m][1], pairs[m], second);
                return;
            }
            const Int second = block.second(row + j);
            for (int m = 0; m < M; m++) {
                found[m][0] = dot<j>(found[m][0], pairs[m], first);
                found[m][1] = dot<j>(found[m][1], pairs[m], second);
            }
        };
        const auto add_block = [&](const auto& block, auto& found) TGI_INLINE_LAMBDA {
#pragma GCC unroll (REGISTERS == 1 ? 4 : 1)
            for (int row = 0; row < 16; row += 4) {
                RowPairs pairs[M];
                for (int m = 0; m < M; m++) pairs[m].set(a + m * a_step + k + 2 * row);
                add_row(std::integral_constant<int, 0>(), pairs, block, row, found);
                add_row(std::integral_constant<int, 1>(), pairs, block, row, found);
                add_row(std::integral_constant<int, 2>(), pairs, block, row, found);
                add_row(std::integral_constant<int, 3>(), pairs, block, row, found);
            }
        };
        int n = 0;
        (add_block(ColumnBlock<B>(b), sums[n++]), ...);
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++) store(c + (16 * n + m) * c_step + 16 * half, sums[n][m][half]);
}

// Rows that go through b together without AMX: their sums, for 32 columns, fit the registers.
constexpr int64_t MAX_DOT_ROWS = REGISTERS == 1 ? 8 : 3;

// The sums of up to MAX_DOT_ROWS rows without AMX, or of half as many rows times two blocks of columns.
template <bool add = false, class Sum, class... B>
inline void dot_matmul(const bf16* a, int64_t a_step, int64_t rows, int64_t depth, Sum* c, int64_t c_step, B&... b) {
    with_row_count<MAX_DOT_ROWS / sizeof...(b)>(rows, [&](auto count) {
        dot_rows<add, count>(a, a_step, depth, c, c_step, b...);
    });
}

constexpr int64_t COLUMNS = 32;
constexpr int64_t MAX_TILE_ROWS = 32;

// A panel of 32 columns. Strides in elements: `step` from one pair of inputs to the next, `right` from the first 16
// columns to the other 16, `next` from 32 inputs to the next 32.
struct ColumnBlocks {
    // The next 32 inputs.
    const bf16* next_block() {
        const bf16* found = at;
        at += next;
        if (later < end) prefetch_l2(later, lines), later += CACHE_LINE * lines;
        return found;
    }

    const bf16* at;
    int64_t step, right, next;
    // Software prefetch, since the hardware prefetcher does not look far enough ahead: with every 32 inputs, `lines`
    // cache lines from `later` on, up to `end`.
    const uint8_t *later = nullptr, *end = nullptr;
    int64_t lines = 0;
};

// 32 of `columns` columns that are stored interleaved.
inline ColumnBlocks interleaved_columns(const bf16* at, int64_t columns) { return {at, 2 * columns, 32, 32 * columns}; }

// 32 columns alone, [depth / 32][2][16][16][2]: each of their AMX tiles is contiguous.
inline ColumnBlocks amx_columns(const bf16* at, const uint8_t* later = nullptr, const uint8_t* end = nullptr) {
    return {at, 32, 512, 1024, later, end, 32};
}

// The rows of a: `first` (up to 16) rows with a stride of `step` elements, and `second` (up to 16) more, which begin
// `apart` elements after the first.
struct RowOperand {
    static constexpr bool streamed = false;
    const bf16* at;
    int64_t step, first, second, apart;
};

// Consecutive rows.
inline RowOperand row_operand(const bf16* at, int64_t step, int64_t rows) {
    const int64_t first = rows < 16 ? rows : 16;
    return {at, step, first, rows - first, 16 * step};
}

// Rows that are multiplied with columns which should stay in the L1 cache: they are loaded with a streaming hint.
struct StreamedRows : RowOperand {
    static constexpr bool streamed = true;
};

struct NoWork {
    void operator()() const {}
};

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr bool HAS_AMX = true;
constexpr int64_t MAX_ROWS_PER_PASS = MAX_TILE_ROWS;  // rows that go through b together

// Adds the products of the AMX tiles a and b to the tile c.
template <class Sum, int c, int a, int b>
inline void amx_dot() {
    if (std::is_same_v<Sum, float>) asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    else asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Configures the tiles for products of this many rows, until the next call. Tiles 0 to 3 are sums, 4 and 5 rows of a, 6
// and 7 columns of b. The second rows of a use tiles 2, 3 and 5.
inline void configure_tiles(const RowOperand& a) {
    TileConfig config;
    const uint8_t first = a.first, second = a.second ? a.second : 1;
    const uint8_t tiles[8] = {first, first, second, second, first, second, 16, 16};
    for (int tile = 0; tile < 8; tile++) config.rows[tile] = tiles[tile], config.bytes[tile] = 64;
    asm volatile("ldtilecfg %0" : : "m"(config));
}

// Needs `configure_tiles` for as many rows. `a` is a RowOperand or StreamedRows, depth a multiple of 32, b a
// ColumnBlocks or another type with its `next_block`. `add`: adds to the contents of c [32][c_step], where the second
// rows of a have the rows from 16 on. `overlapped` is called once for every 32 inputs: AMX computes while the core
// executes it.
template <bool add = false, class Sum, class A, class B, class Overlapped = NoWork>
inline void tile_matmul(const A& all, B&& b, int64_t depth, Sum* c, int64_t c_step, Overlapped&& overlapped = {}) {
    const bf16* a = all.at;
    const int64_t a_bytes = all.step * sizeof(bf16), b_bytes = b.step * sizeof(bf16), c_bytes = c_step * sizeof(Sum);
    const bool two = all.second > 0;
    if (add) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + 16, c_bytes);
        if (two) {
            _tile_loadd(2, c + 16 * c_step, c_bytes);
            _tile_loadd(3, c + 16 * c_step + 16, c_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += 32, a += 32) {
        const bf16* pairs = b.next_block();
        if (A::streamed) _tile_stream_loadd(4, a, a_bytes);
        else _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, pairs, b_bytes);
        amx_dot<Sum, 0, 4, 6>();
        _tile_loadd(7, pairs + b.right, b_bytes);
        amx_dot<Sum, 1, 4, 7>();
        if (two) {
            if (A::streamed) _tile_stream_loadd(5, a + all.apart, a_bytes);
            else _tile_loadd(5, a + all.apart, a_bytes);
            amx_dot<Sum, 2, 5, 6>();
            amx_dot<Sum, 3, 5, 7>();
        }
        overlapped();
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    if (two) {
        _tile_stored(2, c + 16 * c_step, c_bytes);
        _tile_stored(3, c + 16 * c_step + 16, c_bytes);
    }
}

// The same for up to 16 rows and two blocks of columns, in alternation of 32 inputs each. Needs `configure_tiles` for
// as many second rows. The sums of the second block are 16 rows below those of the first, in c [32][32].
template <class Sum, class B>
inline void tile_matmul_two(const RowOperand& all, B&& left, B&& right, int64_t depth, Sum* c) {
    const bf16* a = all.at;
    const int64_t a_bytes = all.step * sizeof(bf16), b_bytes = left.step * sizeof(bf16),
        c_bytes = COLUMNS * sizeof(Sum);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += 32, a += 32) {
        const bf16* pairs = left.next_block();
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, pairs, b_bytes);
        amx_dot<Sum, 0, 4, 6>();
        _tile_loadd(7, pairs + left.right, b_bytes);
        amx_dot<Sum, 1, 4, 7>();
        pairs = right.next_block();
        _tile_loadd(6, pairs, b_bytes);
        amx_dot<Sum, 2, 4, 6>();
        _tile_loadd(7, pairs + right.right, b_bytes);
        amx_dot<Sum, 3, 4, 7>();
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, c + 16 * COLUMNS, c_bytes);
    _tile_stored(3, c + 16 * COLUMNS + 16, c_bytes);
}

#else

constexpr bool HAS_AMX = false;
constexpr int64_t MAX_ROWS_PER_PASS = MAX_DOT_ROWS;

inline void configure_tiles(const RowOperand&) {}

template <bool add = false, class Sum, class A, class B, class Overlapped = NoWork>
inline void tile_matmul(const A& all, B&& b, int64_t depth, Sum* c, int64_t c_step, Overlapped&& overlapped = {}) {
    for (int64_t k = 0; k < depth; k += 32) overlapped();  // here nothing overlaps
    for (const bool second : {false, true}) {
        const bf16* a = all.at + second * all.apart;
        const int64_t rows = second ? all.second : all.first;
        for (int64_t row = 0; row < rows; row += MAX_DOT_ROWS) {
            const auto multiply = [&](auto& from) {
                Sum* to = c + (16 * second + row) * c_step;
                dot_matmul<add>(a + row * all.step, all.step, std::min(rows - row, MAX_DOT_ROWS), depth, to, c_step,
                    from);
            };
            if (row + MAX_DOT_ROWS >= rows && (second || !all.second)) return multiply(b);
            auto again = b;
            multiply(again);
        }
    }
}

template <class Sum, class B>
inline void tile_matmul_two(const RowOperand& all, B&& left, B&& right, int64_t depth, Sum* c) {
    // Of few rows the sums of one block would wait for each other.
    if (all.first <= MAX_DOT_ROWS / 2) return dot_matmul(all.at, all.step, all.first, depth, c, COLUMNS, left, right);
    const RowOperand first{all.at, all.step, all.first, 0, 0};
    tile_matmul(first, left, depth, c, COLUMNS);
    tile_matmul(first, right, depth, c + 16 * COLUMNS, COLUMNS);
}

#endif

// The same for rows that are read again soon.
template <bool add = false, class B>
inline void tile_matmul(const bf16* a, int64_t a_step, int64_t rows, B&& b, int64_t depth, float* c, int64_t c_step) {
    tile_matmul<add>(row_operand(a, a_step, rows), b, depth, c, c_step);
}

// The same for columns that are stored interleaved with others.
template <bool add = false>
inline void tile_matmul(const bf16* a, int64_t a_step, int64_t rows, const bf16* b, int64_t columns, int64_t depth,
    float* c,
                    int64_t c_step) {
    tile_matmul<add>(a, a_step, rows, interleaved_columns(b, columns), depth, c, c_step);
}

// To be called before products of this many consecutive rows.
inline void configure_tiles(int64_t rows) { configure_tiles(row_operand(nullptr, 0, rows)); }

}  // namespace tgi
