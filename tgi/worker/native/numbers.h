// What a product multiplies, for linear.cpp: where rows are, how panels become columns, and what sums stand for.
#pragma once
#include "codes.h"
#include "finish.h"
#include "nibbles.h"
#include "planes.h"

namespace tgi {

// Rows of bfloat16, sums in float32, and weights that are bfloat16 or codes for it.
struct Floats {
    using Sum = float;
    using Found = Sums;
    static constexpr int64_t HIGH = MOST_ROWS;  // rows of a block

    Rows rows(int64_t row, int64_t count) const {
        return rows_at(call.x + row * call.weight.inputs, call.weight.inputs, count);
    }
    Found found(const float* sums, int64_t, const uint8_t*) const { return {sums}; }
    Found few_found(const float* sums, int64_t, const uint8_t*) const { return {sums}; }

    // Calls `use` with what turns a panel into columns, of all its inputs.
    template <class Use>
    void panels(const uint8_t* end, const Use& use) const {
        if (call.weight.form.bits == 16)
            return use([=](const uint8_t* panel) { return tiled((const bf16*)panel, panel + AHEAD, end); });
        with_form(call.weight.form, [&](auto bits, auto shifts) {
            use([&](const uint8_t* panel) { return Codes<bits, shifts>(call.weight, panel); });
        });
    }

    // Whether so many rows go through two panels by turns: where codes take their time between one line and the next.
    bool pairs(int64_t rows) const { return call.weight.form.bits < 16 && rows <= 16; }

    // The sums of few rows and a panel, or two: those of the second stand 16 rows behind.
    template <class B>
    void few(const Rows& x, int64_t depth, float* sums, B&& panel) const { product(x, panel, depth, sums, COLUMNS); }
    template <class B>
    void few(const Rows& x, int64_t depth, float* sums, B&& left, B&& right) const {
        product_of_two(x, left, right, depth, sums);
    }

    const LinearCall& call;
};

// The same as whole numbers, and sums of bytes: a row is two, so blocks have half as many.
struct Wholes {
    using Sum = int32_t;
    using Found = PlaneSums;
    static constexpr int64_t HIGH = MOST_ROWS / 2;

    Rows rows(int64_t row, int64_t count) const { return planes.rows(row, count); }

    Found found(const int32_t* sums, int64_t row, const uint8_t* panel) const {
        return {sums, HIGH * COLUMNS, planes.units + row, panel};
    }
    Found few_found(const int32_t* sums, int64_t row, const uint8_t* panel) const {
        return {sums, (dots() ? call.rows : HIGH) * COLUMNS, planes.units + row, panel};
    }

    template <class Use>
    void panels(const uint8_t* end, const Use& use) const {
        if (call.weight.form.bits == 4) return use([&](const uint8_t* panel) { return Nibbles(call.weight, panel, 0); });
        const int64_t head = call.weight.form.head(call.weight.inputs);
        use([=](const uint8_t* panel) { return tiled((const bf16*)(panel + head), panel + head + AHEAD, end); });
    }

    bool pairs(int64_t) const { return call.weight.form.bits == 4 && call.rows <= DOTS / 2; }

    // Without AMX upper and lower bytes are rows one behind the other.
    template <class... B>
    void few(const Rows& x, int64_t depth, int32_t* sums, B&&... panels) const {
        if (dots()) return strips(x.at, x.step, 2 * x.first, depth, sums, COLUMNS, Nothing(), panels...);
        if constexpr (sizeof...(panels) == 1) product(x, panels..., depth, sums, COLUMNS);
    }

    // Whether there are so few rows in all that they are quicker without AMX.
    bool dots() const { return call.rows <= DOTS; }

    static constexpr int64_t DOTS = STRIP / 2;
    const LinearCall& call;
    const Planes planes;
};

}  // namespace tgi
