// Columns of packed weights for the FMA engine: plain numbers, and codes that are decoded to float32 in registers.
// packed_weight.cpp describes the layouts.
//
// Codes in groups are summed group by group: scale * (sum of x * code) + shift * (sum of x). An integer becomes a float32
// number, whose scale is applied to the whole sum. The 4-bit codebook has integers too: round(level * factor / 127), where the
// levels are the numbers of the first factor, 127, and a factor is the negative number of code 0, whose level is -127.
#pragma once
#include "fma_tile.h"
#include "packed_weight.h"

namespace tgi {

TGI_INLINE void prefetch_ahead(const uint8_t* at, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += CACHE_LINE) prefetch_l1(at + PREFETCH_DISTANCE + line);
}

// Numbers of a panel.
template <class T>
struct PanelColumns {
    static constexpr int64_t step = 32, right = 512;

    const T* next_block() {
        const T* found = at;
        at += 32 * PANEL;
        return found;
    }

    const T* at;
};

// Codes that have been decoded, and are in the cache.
struct DecodedColumns : PanelColumns<float> {};

template <class Columns>
constexpr bool IS_PLAIN = false;
template <class T>
constexpr bool IS_PLAIN<PanelColumns<T>> = true;

// Blocks of 32 inputs of codes as float32 numbers, for `fma_pairs`. A byte of two 4-bit codes is lower + 16 upper, and
//   even input * lower + odd input * upper = (even - odd / 16) * lower + odd / 16 * byte,
// so the rows have these factors (GroupSumsJob), and a pair takes one mask and no shift: a seventh less than two masks.
struct NibbleBlock {
    static constexpr int64_t SIZE = 16 * PANEL;  // from one block to the next

    template <int which>
    TGI_INLINE Float input(int j, int half) const {
        const Int bytes = load(at + 256 * half + 16 * j);
        return to_float(which ? bytes : bytes & broadcast(0x0f));
    }

    const uint8_t* at;
};

// The numbers of a table of 16 that 16 bytes from 0 to 15 select.
typedef uint8_t Bytes __attribute__((vector_size(16)));

TGI_INLINE Int look_up(const int8_t* table, Bytes at) {
#if defined(__x86_64__)
    const __m128i found = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table), (__m128i)at);
#if defined(__AVX512F__)
    return {{(IntRegister)_mm512_cvtepi8_epi32(found)}};
#else
    return {{(IntRegister)_mm256_cvtepi8_epi32(found),
        (IntRegister)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(found, found))}};
#endif
#else
    alignas(16) int8_t found[16];
    vst1q_s8(found, vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)at));
    return load(found);
#endif
}

TGI_INLINE Bytes load_bytes(const uint8_t* at) {
    Bytes found;
    memcpy(&found, at, 16);
    return found;
}

// The numbers of a table, which is given as bytes and as floats, for the lower (0) or upper (1) codes of 16 bytes.
template <int which>
TGI_INLINE Float nibbles(const uint8_t* codes, [[maybe_unused]] const int8_t* table, [[maybe_unused]] Float numbers) {
#if defined(__AVX512F__)
    // The permutation uses the lower four bits of each lane and ignores the others.
    const __m512i words = _mm512_cvtepu8_epi32((__m128i)load_bytes(codes));
    return {{_mm512_permutexvar_ps(which ? _mm512_srli_epi32(words, 4) : words, numbers.part[0])}};
#else
    return to_float(look_up(table, which ? load_bytes(codes) >> 4 : load_bytes(codes) & 15));
#endif
}

alignas(16) constexpr int8_t E2M1_DOUBLED[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The same of 4-bit floats, each with its row's own factor.
struct Float4Block {
    static constexpr int64_t SIZE = 16 * PANEL;

    template <int which>
    TGI_INLINE Float input(int j, int half) const {
        return nibbles<which>(at + 256 * half + 16 * j, E2M1_DOUBLED, numbers);
    }

    const uint8_t* at;
    Float numbers = to_float(load(E2M1_DOUBLED));
};

template <class T>
struct CodeBlock {
    static constexpr int64_t SIZE = 32 * PANEL;

    template <int which>
    TGI_INLINE Float input(int j, int half) const {
        const T* const tile = at + 512 * half + 32 * j + 16 * which;
        if constexpr (std::is_same_v<T, float>) return load(tile);
        else return to_float(load(tile));
    }

    const T* at;
};

// Units of a panel: the scales and shifts (float16 or float32) of a group, or of two groups of 16 inputs, and their codes.
// `decoded`: the codes as float32, which replace those of the units.
template <class BlockType, bool has_shifts>
struct GroupColumns {
    using Block = BlockType;
    // Without shifts, 4-bit codes are 8 too large.
    static constexpr bool shifts = has_shifts, subtracts_eight = !has_shifts && std::is_same_v<Block, NibbleBlock>;

    const uint8_t* at;
    int64_t group, header, unit_bytes;  // inputs of a group, bytes of a unit before its codes, bytes of a unit
    int64_t scale_bytes;
    const float* decoded = nullptr;

    // The scale (0) or shift (1) of output n of the panel.
    float factor(const uint8_t* header, int shift, int64_t n) const {
        const int64_t at = PANEL * shift + n;
        return scale_bytes == 4 ? ((const float*)header)[at] : to_float(((const f16*)header)[at]);
    }

    // The scales or shifts of 16 outputs.
    TGI_INLINE Float factors(const uint8_t* header, int shift, int half) const {
        const int64_t at = PANEL * shift + LANES * half;
        return scale_bytes == 4 ? load((const float*)header + at) : load((const f16*)header + at);
    }
};

template <class Columns>
constexpr bool IS_GROUPED = false;
template <class Block, bool shifts>
constexpr bool IS_GROUPED<GroupColumns<Block, shifts>> = true;

// Adds a group's sums of codes, times the scales, and its sum of x, times the shifts.
template <class Columns, int R, int V>
TGI_INLINE void add_group(const Columns& columns, const uint8_t* header, int half, const Float (&sums)[R][V],
    const float* x_sums, int64_t x_sums_step, bool add, float* c, int64_t c_step) {
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
        const Float scale = columns.factors(header, 0, half + v);
        Float shift;
        if (Columns::shifts) shift = columns.factors(header, 1, half + v);
        if (Columns::subtracts_eight) shift = scale * broadcast(-8.f);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float* const to = c + r * c_step + LANES * v;
            Float sum = fma(sums[r][v], scale, add ? load(to) : zeros());
            if (Columns::shifts || Columns::subtracts_eight)
                sum = fma(broadcast(x_sums[r * x_sums_step]), shift, sum);
            store(to, sum);
        }
    }
}

// The sums of R rows times V times 16 columns, from column 16 * half on. A group's codes are summed first.
template <int R, int V, bool decoded, class Columns>
__attribute__((noinline)) void fma_groups(const float* a, int64_t a_step, const float* x_sums, int64_t x_sums_step,
    const Columns& columns, int half, int64_t depth, bool add, float* c, int64_t c_step) {
    using Block = std::conditional_t<decoded, CodeBlock<float>, typename Columns::Block>;
    using Code = std::remove_reference_t<decltype(*Block::at)>;
    const int64_t group = columns.group, group_bytes = columns.header / (group == 16 ? 2 : 1);
    const uint8_t* unit = columns.at;
    const float* decoded_unit = columns.decoded;
    for (int64_t k = 0; k < depth; unit += columns.unit_bytes) {
        if (!decoded) prefetch_ahead(unit, columns.header);
        Block block{decoded ? (Code*)decoded_unit : (Code*)(unit + columns.header)};
        const auto finish = [&](int64_t number, const Float (&sums)[R][V]) __attribute__((always_inline)) {
            add_group(columns, unit + number * group_bytes, half, sums, x_sums++, x_sums_step, add, c, c_step);
            add = true;
        };
        if (group == 16) {
            for (int number = 0; number < 2; number++) {
                Float sums[R][V];
                begin_sums(false, c, c_step, sums);
                fma_pairs<8>(a + k, a_step, block, 8 * number, half, sums);
                finish(number, sums);
            }
            k += 32, decoded_unit += 32 * PANEL;
            continue;
        }
        Float sums[R][V];
        begin_sums(false, c, c_step, sums);
        for (const int64_t end = k + group; k < end; k += 32, block.at += Block::SIZE)
            fma_pairs<16>(a + k, a_step, block, 0, half, sums);
        finish(0, sums);
        decoded_unit += group * PANEL;
    }
}

template <int R, bool decoded, class Columns>
inline void fma_groups(const float* a, int64_t a_step, const float* x_sums, int64_t x_sums_step,
    const Columns& columns, int64_t depth, bool add, float* c) {
    if constexpr (R <= WIDE_FMA_ROWS)
        return fma_groups<R, 2, decoded>(a, a_step, x_sums, x_sums_step, columns, 0, depth, add, c, PANEL);
    else
        for (int half = 0; half < 2; half++)
            fma_groups<R, 1, decoded>(a, a_step, x_sums, x_sums_step, columns, half, depth, add, c + LANES * half,
                PANEL);
}

// Up to FMA_ROWS rows; c is [rows][PANEL]. x_sums [rows][x_sums_step]: the sums of the rows' inputs in each group.
template <bool decoded, class Columns>
inline void fma_few_groups(const float* a, int64_t a_step, int64_t rows, const float* x_sums, int64_t x_sums_step,
    const Columns& columns, int64_t depth, bool add, float* c) {
    with_row_count<FMA_ROWS>(rows, [&](auto count) {
        fma_groups<count, decoded>(a, a_step, x_sums, x_sums_step, columns, depth, add, c);
    });
}

// 8-bit integers.
struct IntegerColumns {
    const int8_t* next_block() {
        const int8_t* found = at;
        at += 32 * PANEL;
        return found;
    }

    const int8_t* at;
};

template <>
struct FmaBlock<IntegerColumns> {
    FmaBlock() = default;
    TGI_INLINE explicit FmaBlock(IntegerColumns& all) : at(all.next_block()) {}

    template <int which>
    TGI_INLINE Float input(int j, int half) const {
        return to_float(load(at + 512 * half + 32 * j + 16 * which));
    }

    const int8_t* at;
};

// Codes of the 4-bit codebook.
class CodebookColumns {
  public:
    CodebookColumns(const int8_t* table, const uint8_t* panel) : table_(table), at_(panel) {
        for (int64_t n = 0; n < 8; n++) factors_[n] = -table[16 * n];
    }

  private:
    friend struct FmaBlock<CodebookColumns>;
    const int8_t* const table_;  // [8][16]
    alignas(16) int8_t factors_[16] = {};  // the 8 factors
    const uint8_t* at_;
};

template <>
struct FmaBlock<CodebookColumns> {
    FmaBlock() = default;
    TGI_INLINE explicit FmaBlock(CodebookColumns& all)
        : table(all.table_), at(all.at_ + PANEL), levels(to_float(load(all.table_))) {
        for (int half = 0; half < 2; half++)
            factor[half] = to_float(look_up(all.factors_, load_bytes(all.at_ + LANES * half))) * broadcast(1 / 127.f);
        all.at_ += PANEL + 512;
    }

    template <int which>
    TGI_INLINE Float input(int j, int half) const {
        // Near 1.5 * 2^23 all float32 numbers are integers: an addition rounds to them, ties to even.
        const Float rounder = broadcast(12582912.f);
        return fma(nibbles<which>(at + 256 * half + 16 * j, table, levels), factor[half], rounder) - rounder;
    }

    const int8_t* table;
    const uint8_t* at;  // the codes
    Float levels, factor[2];
};

template <class T>
constexpr int64_t PREFETCHED<FmaBlock<PanelColumns<T>>> = 2 * PANEL * sizeof(T);
template <>
inline constexpr int64_t PREFETCHED<FmaBlock<IntegerColumns>> = 2 * PANEL;
template <>
inline constexpr int64_t PREFETCHED<FmaBlock<CodebookColumns>> = PANEL;
template <>
inline constexpr int64_t PREFETCHED<CodeBlock<int8_t>> = 2 * PANEL;
template <>
inline constexpr int64_t PREFETCHED<NibbleBlock> = PANEL;
template <>
inline constexpr int64_t PREFETCHED<Float4Block> = PANEL;

// Calls `use` with a function that makes the columns of a panel from its input `k` on: of numbers, k is a multiple of 32.
template <class Use>
void with_numbers(const PackedWeight& w, const Use& use) {
    const auto plain = [&](auto number_type) {
        using T = decltype(number_type);
        use([&](int64_t number, int64_t k) { return PanelColumns<T>{(const T*)w.panel(number) + k * PANEL}; });
    };
    if (w.form.bits == 32) plain(float());
    else w.form.half ? plain(f16()) : plain(bf16());
}

// The same for integers.
template <class Use>
void with_integers(const PackedWeight& w, const Use& use) {
    const auto at = [&w](int64_t number, int64_t k) {
        const int64_t header = w.form.header_bytes(w.inputs);
        return w.panel(number) + header + k * PANEL * w.form.bits / 8 + k / 32 * w.form.factor_bytes();
    };
    if (w.form.bits == 8)
        use([&](int64_t number, int64_t k) { return IntegerColumns{(const int8_t*)at(number, k)}; });
    else use([&](int64_t number, int64_t k) { return CodebookColumns((const int8_t*)w.at, at(number, k)); });
}

// The same for codes in groups, with a type of blocks of codes; `k` is a multiple of the unit.
template <class Block, class Use>
void with_groups(const PackedWeight& w, const Use& use) {
    const WeightFormat& form = w.form;
    const int64_t header = form.unit() / form.group * form.group_bytes();
    const int64_t unit_bytes = header + form.unit() * PANEL * form.bits / 8;
    const auto grouped = [&](auto shifts) {
        use([&](int64_t number, int64_t k) {
            const uint8_t* at = w.panel(number) + k / form.unit() * unit_bytes;
            return GroupColumns<Block, shifts>{at, form.group, header, unit_bytes, form.scale_bytes};
        });
    };
    if constexpr (std::is_same_v<Block, Float4Block>) grouped(std::false_type());
    else form.shifts ? grouped(std::true_type()) : grouped(std::false_type());
}

// The same for formats of one kind.
template <FormatKind kind, class Use>
void with_columns(const PackedWeight& w, const Use& use) {
    if constexpr (kind == FormatKind::numbers) with_numbers(w, use);
    else if constexpr (kind == FormatKind::integers) with_integers(w, use);
    else if constexpr (kind == FormatKind::eight_bit_groups) with_groups<CodeBlock<int8_t>>(w, use);
    else if constexpr (kind == FormatKind::four_bit_floats) with_groups<Float4Block>(w, use);
    else with_groups<NibbleBlock>(w, use);
}

}  // namespace tgi
