// The product that all others are made of: a few rows of numbers times a block of 32 columns, in float32.
//
// c[r][n] = sum over k of a[r][k] * b[k][n], for up to 32 rows and 32 columns. `a` is dense in k. `b` holds the pairs
// b[2 j][n], b[2 j + 1][n] side by side, which is what AMX tiles and AVX-512 dot products of pairs both take. Each c is
// summed over k in the same order whatever the number of rows, and whether at once or in parts of multiples of 32.
#pragma once
#include <cstring>

#include "vectors.h"

namespace tgi {

constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int64_t COLUMNS = 32;
constexpr int64_t MOST_ROWS = 32;

// Bytes by which is asked ahead. It is as soon as that brings all that memory can; beyond the page of 4 KB it would be of
// no use, since the processor's own looking ahead begins anew in each.
constexpr int64_t AHEAD = 1536;

// Asks the core's first cache for a cache line.
inline void soon(const uint8_t* at) { _mm_prefetch((const char*)at, _MM_HINT_T0); }

// Asks the second one for so many.
inline void ask(const uint8_t* at, int64_t lines) {
    for (; lines > 0; lines--, at += LINE) _mm_prefetch((const char*)at, _MM_HINT_T1);
}

// Where 32 columns stand, in numbers: from one pair of inputs to the next `step`, from the first 16 columns to the others
// `right`, from 32 inputs to the next 32 `next`.
struct Columns {
    // The next 32 inputs.
    const bf16* block() {
        const bf16* found = at;
        at += next;
        if (later < end) ask(later, lines), later += LINE * lines;
        return found;
    }

    const bf16* at;
    int64_t step, right, next;
    // What is needed later is asked for now, since the processor does not look as far ahead by itself: with every 32
    // inputs so many cache lines from `later` on, up to `end`.
    const uint8_t *later = nullptr, *end = nullptr;
    int64_t lines = 0;
};

// Pairs of so many columns side by side, of which these are 32.
inline Columns beside(const bf16* at, int64_t columns) { return {at, 2 * columns, 32, 32 * columns}; }

// 32 columns alone, [depth / 32][2][16][16][2]: each of the AMX tiles that hold them is in one piece.
inline Columns tiled(const bf16* at, const uint8_t* later = nullptr, const uint8_t* end = nullptr) {
    return {at, 32, 512, 1024, later, end, 32};
}

// Where rows of a stand, in numbers from one to the next `step`.
struct Rows {
    static constexpr bool passing = false;
    const bf16* at;
    int64_t step;
};

// Rows that are many for the same columns. They pass the core's first cache by, so that the columns stay in it.
struct PassingRows : Rows {
    static constexpr bool passing = true;
};

struct Nothing {
    void operator()() const {}
};

#if defined(__AMX_BF16__)

constexpr int64_t ROWS_AT_ONCE = MOST_ROWS;  // these go through b together
constexpr int64_t ROWS_OF_TWO = 16;           // and these through two of them

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Makes the tiles fit products of so many rows, until it is called again. Tiles 0 to 3 are sums, 4 and 5 rows of a, 6 and
// 7 columns of b; rows behind the 16th, or a second block of columns for up to 16, go through 2, 3 and 5.
inline void prepare(int64_t rows) {
    TileConfig config;
    const uint8_t first = rows < 16 ? rows : 16, second = rows > 16 ? rows - 16 : rows;
    const uint8_t tiles[8] = {first, first, second, second, first, second, 16, 16};
    for (int tile = 0; tile < 8; tile++) config.rows[tile] = tiles[tile], config.bytes[tile] = 64;
    asm volatile("ldtilecfg %0" : : "m"(config));
}

// After `prepare(rows)`. `a` is Rows or PassingRows; depth is a multiple of 32; b is Columns or what gives its blocks as
// they do. `add`: to what is in c [rows][c_step]. `meanwhile` is called once for every 32 inputs: AMX computes while the
// core does what can be done in between.
template <bool add = false, class A, class B, class Meanwhile = Nothing>
inline void product(const A& all, int64_t rows, B&& b, int64_t depth, float* c, int64_t c_step, Meanwhile&& meanwhile = {}) {
    const bf16* a = all.at;
    const int64_t a_step = all.step, a_bytes = a_step * sizeof(bf16), b_bytes = b.step * sizeof(bf16), c_bytes = c_step * sizeof(float);
    const bool two = rows > 16;
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
        const bf16* pairs = b.block();
        if (A::passing) _tile_stream_loadd(4, a, a_bytes);
        else _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, pairs, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, pairs + b.right, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            if (A::passing) _tile_stream_loadd(5, a + 16 * a_step, a_bytes);
            else _tile_loadd(5, a + 16 * a_step, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        meanwhile();
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    if (two) {
        _tile_stored(2, c + 16 * c_step, c_bytes);
        _tile_stored(3, c + 16 * c_step + 16, c_bytes);
    }
}

// The same of up to ROWS_OF_TWO rows and two blocks of columns, 32 inputs of one and of the other in turn. The sums of the
// second block stand behind those of the first, in c [2][rows][32].
template <class B>
inline void product_of_two(const bf16* a, int64_t a_step, int64_t rows, B&& left, B&& right, int64_t depth, float* c) {
    const int64_t a_bytes = a_step * sizeof(bf16), b_bytes = left.step * sizeof(bf16), c_bytes = COLUMNS * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += 32, a += 32) {
        const bf16* pairs = left.block();
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, pairs, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, pairs + left.right, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
        pairs = right.block();
        _tile_loadd(6, pairs, b_bytes);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, pairs + right.right, b_bytes);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    c += rows * COLUMNS;
    _tile_stored(2, c, c_bytes);
    _tile_stored(3, c + 16, c_bytes);
}

#else

constexpr int64_t ROWS_AT_ONCE = 8;
constexpr int64_t ROWS_OF_TWO = ROWS_AT_ONCE;

inline void prepare(int64_t) {}

template <bool add, int M, class B, class Meanwhile>
inline void strip(const bf16* a, int64_t a_step, B& b, int64_t depth, float* c, int64_t c_step, Meanwhile& meanwhile) {
    __m512 sums[M][2];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++)
            sums[m][n] = add ? _mm512_loadu_ps(c + m * c_step + 16 * n) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 32) {
        const bf16* pairs = b.block();
        for (int64_t j = k; j < k + 32; j += 2, pairs += b.step) {
            const __m512bh first = (__m512bh)_mm512_loadu_si512(pairs);
            const __m512bh second = (__m512bh)_mm512_loadu_si512(pairs + b.right);
            for (int m = 0; m < M; m++) {
                int32_t pair;
                memcpy(&pair, a + m * a_step + j, 4);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                sums[m][0] = _mm512_dpbf16_ps(sums[m][0], both, first);
                sums[m][1] = _mm512_dpbf16_ps(sums[m][1], both, second);
            }
        }
        meanwhile();
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) _mm512_storeu_ps(c + m * c_step + 16 * n, sums[m][n]);
}

template <bool add = false, class A, class B, class Meanwhile = Nothing>
inline void product(const A& all, int64_t rows, B&& b, int64_t depth, float* c, int64_t c_step, Meanwhile&& meanwhile = {}) {
    const bf16* a = all.at;
    const int64_t a_step = all.step;
    for (; rows > 8; rows -= 8, a += 8 * a_step, c += 8 * c_step) {
        auto again = b;
        strip<add, 8>(a, a_step, again, depth, c, c_step, meanwhile);
    }
    switch (rows) {
        case 8: return strip<add, 8>(a, a_step, b, depth, c, c_step, meanwhile);
        case 7: return strip<add, 7>(a, a_step, b, depth, c, c_step, meanwhile);
        case 6: return strip<add, 6>(a, a_step, b, depth, c, c_step, meanwhile);
        case 5: return strip<add, 5>(a, a_step, b, depth, c, c_step, meanwhile);
        case 4: return strip<add, 4>(a, a_step, b, depth, c, c_step, meanwhile);
        case 3: return strip<add, 3>(a, a_step, b, depth, c, c_step, meanwhile);
        case 2: return strip<add, 2>(a, a_step, b, depth, c, c_step, meanwhile);
        case 1: return strip<add, 1>(a, a_step, b, depth, c, c_step, meanwhile);
    }
}

template <class B>
inline void product_of_two(const bf16* a, int64_t a_step, int64_t rows, B&& left, B&& right, int64_t depth, float* c) {
    product(Rows{a, a_step}, rows, left, depth, c, COLUMNS);
    product(Rows{a, a_step}, rows, right, depth, c + rows * COLUMNS, COLUMNS);
}

#endif

// The same for rows that are read again soon.
template <bool add = false, class B>
inline void product(const bf16* a, int64_t a_step, int64_t rows, B&& b, int64_t depth, float* c, int64_t c_step) {
    product<add>(Rows{a, a_step}, rows, b, depth, c, c_step);
}

// The same with columns that stand beside others.
template <bool add = false>
inline void product(const bf16* a, int64_t a_step, int64_t rows, const bf16* b, int64_t columns, int64_t depth, float* c,
                    int64_t c_step) {
    product<add>(a, a_step, rows, beside(b, columns), depth, c, c_step);
}

}  // namespace tgi
