// Products with packed weights on the FMA engine.
//
// Few rows read each panel of the weight once. Many rows go over a panel in parts that stay in the L1 cache: numbers are
// widened each time, which takes one instruction for several multiplications; codes are decoded to float32 once.
#pragma once
#include "epilogue.h"
#include "fma_decoders.h"
#include "linear_job.h"

namespace tgi {

// Reads float32 sums [rows][32], times the scales of the outputs if there are any.
struct ScaledSums {
    Float of(int half) const {
        const Float sum = load(at + LANES * half);
        return scales ? sum * load(scales + LANES * half) : sum;
    }
    void next(int64_t rows) { at += rows * PANEL; }

    const float *at, *scales;
};

struct FmaLinearJob final : LinearJob {
    FmaLinearJob(const LinearCall& call, const OperandRows& x, int64_t threads)
        : LinearJob(call, chunk_rows(call, FMA_ROWS), threads), x(x), depth(x.step) {}

    void compute(int64_t row, int64_t rows, int64_t first, int64_t last) const override {
        with_columns(w, [&](const auto& columns_at) {
            if (rows <= FMA_ROWS) few_rows(row, rows, first, last, columns_at);
            else many_rows(row, rows, first, last, columns_at);
        });
    }

  private:
    // Bytes of a part of 16 outputs that stays in the L1 cache next to the rows.
    static constexpr int64_t PART_BYTES = 16384, MAX_PART_INPUTS = PART_BYTES / LANES / sizeof(bf16);

    void finish(int64_t number, int64_t row, int64_t rows, const float* sums) const {
        const auto* scales = w.form.integer ? (const float*)w.panel(number) : nullptr;
        apply_epilogue(call_of(number), row, rows, first_output(number), ScaledSums{sums, scales});
    }

    template <class ColumnsAt>
    void few_rows(int64_t row, int64_t rows, int64_t first, int64_t last, const ColumnsAt& columns_at) const {
        alignas(64) float sums[FMA_ROWS][PANEL];
        for (int64_t number = first; number < last; number++) {
            auto columns = columns_at(number, 0);
            fma_few_rows<false>(x.at + row * x.step, x.step, rows, columns, depth, sums[0], PANEL);
            finish(number, row, rows, sums[0]);
        }
    }

    template <class ColumnsAt>
    void many_rows(int64_t row, int64_t rows, int64_t first, int64_t last, const ColumnsAt& columns_at) const {
        alignas(64) static thread_local float sums[MAX_CHUNK_ROWS + FMA_ROWS][PANEL];
        const int64_t unit = w.form.unit(), parts = (depth + part_inputs() - 1) / part_inputs();
        const int64_t part = (depth / unit + parts - 1) / parts * unit;
        for (int64_t number = first; number < last; number++)
            for (int64_t k = 0; k < depth; k += part) {
                const int64_t inputs = std::min(part, depth - k);
                const auto columns = columns_at(number, k);
                if constexpr (IS_PLAIN<decltype(columns)>) {
                    part_of_rows(number, row, rows, k, inputs, columns.cached(), sums[0]);
                } else {
                    alignas(64) static thread_local float room[MAX_PART_INPUTS / 2 + 128][PANEL];  // whole groups
                    decode(columns, inputs, room[0]);
                    part_of_rows(number, row, rows, k, inputs, PanelColumns<float, false>{room[0]}, sums[0]);
                }
            }
    }

    int64_t part_inputs() const {
        return w.form.bits == 16 ? MAX_PART_INPUTS : MAX_PART_INPUTS / 2;
    }

    // The sums of all rows times a part of a panel, and the epilogue after the last part.
    template <class Columns>
    void part_of_rows(int64_t number, int64_t row, int64_t rows, int64_t k, int64_t inputs, const Columns& columns,
        float* sums) const {
        for (int64_t done = 0; done < rows; done += FMA_ROWS, sums += FMA_ROWS * PANEL) {
            const int64_t count = std::min(rows - done, FMA_ROWS);
            const float* from = x.at + (row + done) * x.step + k;
            Columns again = columns;
            if (k) fma_few_rows<true>(from, x.step, count, again, inputs, sums, PANEL);
            else fma_few_rows<false>(from, x.step, count, again, inputs, sums, PANEL);
            if (k + inputs == depth) finish(number, row + done, count, sums);
        }
    }

    template <class Columns>
    static void decode(Columns columns, int64_t inputs, float* to) {
        for (int64_t k = 0; k < inputs; k += 32, to += 32 * PANEL) {
            const FmaBlock<Columns> block(columns);
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
                for (int j = 0; j < 16; j++) {
                    Float pair[2];
                    block.pair(j, half, pair);
                    store(to + 512 * half + 32 * j, pair[0], pair[1]);
                }
        }
    }

    const OperandRows x;
    const int64_t depth;
};

inline void run_linear(ThreadPool& pool, const LinearCall& call) {
    const FmaLinearJob job(call, operand_rows(pool, call), pool.threads());
    pool.run(job, job.queue.threads());
}

}  // namespace tgi
