// Columns of packed weights for the FMA engine: plain numbers, and codes that are decoded to float32 in registers.
// packed_weight.cpp describes the layouts.
//
// A code in a group becomes scale * code + shift, rounded once: the product is exact. An integer becomes a float32
// number, whose scale is applied to the sum. The 4-bit codebook has integers too: round(level * factor / 127), where the
// levels are the numbers of the first factor, 127, and a factor is the negative number of code 0, whose level is -127.
#pragma once
#include "fma_tile.h"
#include "packed_weight.h"

namespace tgi {

inline void prefetch_ahead(const uint8_t* at, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += CACHE_LINE) prefetch_l1(at + PREFETCH_DISTANCE + line);
}

// Numbers of a panel. Few rows need them prefetched, many rows find them in the cache.
template <class T, bool prefetches>
struct PanelColumns {
    static constexpr int64_t step = 32, right = 512, BYTES = 32 * PANEL * sizeof(T);  // of 32 inputs

    const T* next_block() {
        if (prefetches) prefetch_ahead((const uint8_t*)at, BYTES);
        const T* found = at;
        at += 32 * PANEL;
        return found;
    }

    PanelColumns<T, false> cached() const { return {at}; }

    const T* at;
};

template <class Columns>
constexpr bool IS_PLAIN = false;
template <class T, bool prefetches>
constexpr bool IS_PLAIN<PanelColumns<T, prefetches>> = true;
template <class T, bool prefetches>
constexpr bool IS_PLAIN<const PanelColumns<T, prefetches>> = true;

// The inputs 2 j and 2 j + 1 of 4-bit codes, from 0 to 15.
TGI_INLINE void load_nibbles(const uint8_t* at, Int (&pair)[2]) {
    const Int bytes = load(at);
    pair[0] = bytes & broadcast(15), pair[1] = shift_right(bytes, 4);
}

// Codes in groups; Scale is f16 or float.
template <int bits, bool shifts, class Scale>
class GroupColumns {
  public:
    GroupColumns(const WeightFormat& form, const uint8_t* panel) : group_(form.group), at_(panel) {}

  private:
    friend struct FmaBlock<GroupColumns>;

    // Scales, and shifts of the codes as they are stored: without shifts, 4-bit codes are 8 too large.
    TGI_INLINE void load_group(Float (&scale)[2], Float (&shift)[2]) {
        for (int half = 0; half < 2; half++) {
            scale[half] = load((const Scale*)at_ + LANES * half);
            if (shifts) shift[half] = load((const Scale*)at_ + PANEL + LANES * half);
            else if (bits == 4) shift[half] = scale[half] * broadcast(-8.f);
        }
        at_ += PANEL * sizeof(Scale) * (1 + shifts);
    }

    const int64_t group_;
    const uint8_t* at_;
    int64_t left_ = 0;  // inputs of the group
    Float scale_[2][2], shift_[2][2];  // of the first and the other 16 of 32 inputs, if groups have 16; [half of panel]
};

template <int bits, bool shifts, class Scale>
struct FmaBlock<GroupColumns<bits, shifts, Scale>> {
    static constexpr int64_t TILE = 64 * bits;  // bytes of 32 inputs of 16 outputs

    TGI_INLINE explicit FmaBlock(GroupColumns<bits, shifts, Scale>& all) : all(all) {
        prefetch_ahead(all.at_, 2 * TILE + PANEL * sizeof(Scale) * (1 + shifts));
        if (all.group_ == 16) {
            for (int part = 0; part < 2; part++) all.load_group(all.scale_[part], all.shift_[part]);
            second = 1;
        } else {
            if (!all.left_) all.load_group(all.scale_[0], all.shift_[0]), all.left_ = all.group_;
            all.left_ -= 32;
        }
        codes = all.at_;
        all.at_ += 2 * TILE;
    }

    TGI_INLINE void pair(int j, int half, Float (&found)[2]) const {
        Int code[2];
        const uint8_t* tile = codes + half * TILE;
        if (bits == 4) load_nibbles(tile + 16 * j, code);
        else for (int input = 0; input < 2; input++) code[input] = load((const int8_t*)tile + 32 * j + 16 * input);
        const int part = j < 8 ? 0 : second;
        for (int input = 0; input < 2; input++) {
            const Float number = to_float(code[input]), scale = all.scale_[part][half];
            found[input] = shifts || bits == 4 ? fma(number, scale, all.shift_[part][half]) : number * scale;
        }
    }

    GroupColumns<bits, shifts, Scale>& all;
    const uint8_t* codes;
    int second = 0;  // index of the scales of the other 16 inputs
};

// 8-bit integers.
struct IntegerColumns {
    const int8_t* next_block() {
        prefetch_ahead((const uint8_t*)at, 32 * PANEL);
        const int8_t* found = at;
        at += 32 * PANEL;
        return found;
    }

    const int8_t* at;
};

template <>
struct FmaBlock<IntegerColumns> {
    TGI_INLINE explicit FmaBlock(IntegerColumns& all) : at(all.next_block()) {}

    TGI_INLINE void pair(int j, int half, Float (&found)[2]) const {
        for (int input = 0; input < 2; input++) found[input] = to_float(load(at + 512 * half + 32 * j + 16 * input));
    }

    const int8_t* at;
};

// Codes of the 4-bit codebook.
class CodebookColumns {
  public:
    CodebookColumns(const int8_t* table, const uint8_t* panel) : table_(table), at_(panel) {}

  private:
    friend struct FmaBlock<CodebookColumns>;
    const int8_t* const table_;  // [8][16]
    const uint8_t* at_;
};

template <>
struct FmaBlock<CodebookColumns> {
    TGI_INLINE explicit FmaBlock(CodebookColumns& all) : table(all.table_), codes(all.at_ + PANEL) {
        prefetch_ahead(all.at_, PANEL + 512);
        alignas(64) float factors[PANEL];
        for (int64_t n = 0; n < PANEL; n++) factors[n] = -table[16 * all.at_[n]];
        for (int half = 0; half < 2; half++) factor[half] = load(factors + LANES * half) * broadcast(1 / 127.f);
        all.at_ += PANEL + 512;
    }

    TGI_INLINE void pair(int j, int half, Float (&found)[2]) const {
        const uint8_t* at = codes + 256 * half + 16 * j;
        alignas(16) uint8_t code[2][16];
        alignas(16) int8_t level[2][16];
        typedef uint8_t Bytes __attribute__((vector_size(16)));
        Bytes both;
        memcpy(&both, at, 16);
        const Bytes low = both & 15, high = both >> 4;
        memcpy(code[0], &low, 16), memcpy(code[1], &high, 16);
        for (int input = 0; input < 2; input++) {
            look_up(code[input], level[input]);
            found[input] = round_to_even(to_float(load(level[input])) * factor[half]);
        }
    }

    // The levels of 16 codes.
    TGI_INLINE void look_up(const uint8_t* code, int8_t* level) const {
#if defined(__x86_64__)
        const __m128i found = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table), _mm_load_si128(
            (const __m128i*)code));
        _mm_store_si128((__m128i*)level, found);
#else
        vst1q_s8(level, vqtbl1q_s8(vld1q_s8(table), vld1q_u8(code)));
#endif
    }

    const int8_t* const table;
    const uint8_t* const codes;
    Float factor[2];
};

// Calls `use` with a function that makes the columns of a panel from its input `k` on, a multiple of the unit.
template <class Use>
void with_columns(const PackedWeight& w, const Use& use) {
    const WeightFormat& form = w.form;
    const int64_t header = form.header_bytes(w.inputs);
    const auto at = [&w, header](int64_t number, int64_t k) {
        const int64_t bytes = k * PANEL * w.form.bits / 8 + k / 32 * w.form.factor_bytes();
        return w.panel(number) + header + bytes + (w.form.group ? k / w.form.group * w.form.group_bytes() : 0);
    };
    const auto grouped = [&](auto bits, auto shifts, auto scale) {
        use([&](int64_t number, int64_t k) {
            return GroupColumns<bits, shifts, decltype(scale)>(form, at(number, k));
        });
    };
    const auto plain = [&](auto number_type) {
        using T = decltype(number_type);
        use([&](int64_t number, int64_t k) { return PanelColumns<T, true>{(const T*)at(number, k)}; });
    };
    const auto shifted = [&](auto bits, auto shifts) {
        form.scale_bytes == 4 ? grouped(bits, shifts, float()) : grouped(bits, shifts, f16());
    };
    const auto coded = [&](auto bits) {
        form.shifts ? shifted(bits, std::true_type()) : shifted(bits, std::false_type());
    };
    if (form.bits == 32) plain(float());
    else if (form.bits == 16) form.half ? plain(f16()) : plain(bf16());
    else if (form.integer && form.bits == 8)
        use([&](int64_t number, int64_t k) { return IntegerColumns{(const int8_t*)at(number, k)}; });
    else if (form.integer)
        use([&](int64_t number, int64_t k) { return CodebookColumns((const int8_t*)w.at, at(number, k)); });
    else if (form.bits == 8) coded(std::integral_constant<int, 8>());
    else coded(std::integral_constant<int, 4>());
}

}  // namespace tgi
