// The product that all others are made of: a few rows of numbers times a block of 32 columns.
//
// c[r][n] = sum over k of a[r][k] * b[k][n], for up to 32 rows and 32 columns. `a` is dense in k. `b` holds the pairs
// b[2 j][n], b[2 j + 1][n] side by side, which is what AMX tiles and AVX-512 dot products of pairs both take. Numbers are
// bfloat16 and sums float32, each summed over k in the same order whatever the number of rows, and whether at once or in
// parts of multiples of 32; or two bytes stand in place of each number, with sums in int32, which are exact (Kind).
#pragma once
#include <algorithm>

#include "lines.h"
#include "strips.h"
#include "vectors.h"

namespace tgi {

constexpr int64_t COLUMNS = 32;
constexpr int64_t MOST_ROWS = 32;

// Bytes by which is asked ahead. It is as soon as that brings all that memory can; beyond the page of 4 KB it would be of
// no use, since the processor's own looking ahead begins anew in each.
constexpr int64_t AHEAD = 1536;

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

// Where rows of a stand: up to 16, in numbers from one to the next `step`, and up to 16 more, `apart` behind the first ones.
struct Rows {
    static constexpr bool passing = false;
    const bf16* at;
    int64_t step, first, second, apart;
};

// So many rows, one after the other.
inline Rows rows_at(const bf16* at, int64_t step, int64_t rows) {
    const int64_t first = rows < 16 ? rows : 16;
    return {at, step, first, rows - first, 16 * step};
}

// Rows that are many for the same columns. They pass the core's first cache by, so that the columns stay in it.
struct PassingRows : Rows {
    static constexpr bool passing = true;
};

struct Nothing {
    void operator()() const {}
};

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr int64_t ROWS_AT_ONCE = MOST_ROWS;  // these go through b together

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Makes the tiles fit products of so many rows, until it is called again. Tiles 0 to 3 are sums, 4 and 5 rows of a, 6 and
// 7 columns of b; the second rows go through 2, 3 and 5.
inline void prepare(const Rows& a) {
    TileConfig config;
    const uint8_t first = a.first, second = a.second ? a.second : 1;
    const uint8_t tiles[8] = {first, first, second, second, first, second, 16, 16};
    for (int tile = 0; tile < 8; tile++) config.rows[tile] = tiles[tile], config.bytes[tile] = 64;
    asm volatile("ldtilecfg %0" : : "m"(config));
}

// After `prepare` of as many rows. `a` is Rows or PassingRows; depth is a multiple of 32; b is Columns or what gives its
// blocks as they do. `add`: to what is in c [32][c_step], of which the second rows have those from the 16th on.
// `meanwhile` is called once for every 32 inputs: AMX computes while the core does what can be done in between.
template <bool add = false, class Sum, class A, class B, class Meanwhile = Nothing>
inline void product(const A& all, B&& b, int64_t depth, Sum* c, int64_t c_step, Meanwhile&& meanwhile = {}) {
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
        const bf16* pairs = b.block();
        if (A::passing) _tile_stream_loadd(4, a, a_bytes);
        else _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, pairs, b_bytes);
        Kind<Sum>::template tiles<0, 4, 6>();
        _tile_loadd(7, pairs + b.right, b_bytes);
        Kind<Sum>::template tiles<1, 4, 7>();
        if (two) {
            if (A::passing) _tile_stream_loadd(5, a + all.apart, a_bytes);
            else _tile_loadd(5, a + all.apart, a_bytes);
            Kind<Sum>::template tiles<2, 5, 6>();
            Kind<Sum>::template tiles<3, 5, 7>();
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

// The same of up to 16 rows and two blocks of columns, 32 inputs of one and of the other in turn, after `prepare` of as
// many second rows. The sums of the second block stand 16 rows behind those of the first, in c [32][32].
template <class Sum, class B>
inline void product_of_two(const Rows& all, B&& left, B&& right, int64_t depth, Sum* c) {
    const bf16* a = all.at;
    const int64_t a_bytes = all.step * sizeof(bf16), b_bytes = left.step * sizeof(bf16), c_bytes = COLUMNS * sizeof(Sum);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += 32, a += 32) {
        const bf16* pairs = left.block();
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, pairs, b_bytes);
        Kind<Sum>::template tiles<0, 4, 6>();
        _tile_loadd(7, pairs + left.right, b_bytes);
        Kind<Sum>::template tiles<1, 4, 7>();
        pairs = right.block();
        _tile_loadd(6, pairs, b_bytes);
        Kind<Sum>::template tiles<2, 4, 6>();
        _tile_loadd(7, pairs + right.right, b_bytes);
        Kind<Sum>::template tiles<3, 4, 7>();
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, c + 16 * COLUMNS, c_bytes);
    _tile_stored(3, c + 16 * COLUMNS + 16, c_bytes);
}

#else

constexpr int64_t ROWS_AT_ONCE = STRIP;

inline void prepare(const Rows&) {}

template <bool add = false, class Sum, class A, class B, class Meanwhile = Nothing>
inline void product(const A& all, B&& b, int64_t depth, Sum* c, int64_t c_step, Meanwhile&& meanwhile = {}) {
    for (const bool second : {false, true}) {
        const bf16* a = all.at + second * all.apart;
        const int64_t rows = second ? all.second : all.first;
        for (int64_t row = 0; row < rows; row += STRIP) {
            const auto some = [&](auto& from) {
                Sum* to = c + (16 * second + row) * c_step;
                strips<add>(a + row * all.step, all.step, std::min(rows - row, STRIP), depth, to, c_step, meanwhile, from);
            };
            if (row + STRIP >= rows && (second || !all.second)) return some(b);
            auto again = b;
            some(again);
        }
    }
}

template <class Sum, class B>
inline void product_of_two(const Rows& all, B&& left, B&& right, int64_t depth, Sum* c) {
    const Rows first{all.at, all.step, all.first, 0, 0};
    product(first, left, depth, c, COLUMNS);
    product(first, right, depth, c + 16 * COLUMNS, COLUMNS);
}

#endif

// The same for rows that are read again soon.
template <bool add = false, class B>
inline void product(const bf16* a, int64_t a_step, int64_t rows, B&& b, int64_t depth, float* c, int64_t c_step) {
    product<add>(rows_at(a, a_step, rows), b, depth, c, c_step);
}

// The same with columns that stand beside others.
template <bool add = false>
inline void product(const bf16* a, int64_t a_step, int64_t rows, const bf16* b, int64_t columns, int64_t depth, float* c,
                    int64_t c_step) {
    product<add>(a, a_step, rows, beside(b, columns), depth, c, c_step);
}

// Before products of so many rows, one after the other.
inline void prepare(int64_t rows) { prepare(rows_at(nullptr, 0, rows)); }

}  // namespace tgi
