// The rows of each head are gathered, so that the products of all heads are one job of the linear layers' engine, which
// sums each row in an order of its own.
#include "head_products.h"

#include <algorithm>
#include <vector>

#include "linear.h"

namespace tgi {
namespace {

constexpr int64_t GATHERED_ROWS = 8192;  // rows of all heads that are computed together: bounds the scratch memory
constexpr int64_t HEADS_CHUNK_ROWS = 8;  // rows of x in a chunk

// Moves the rows of x to `gathered` [heads, rows, inputs], or the products [heads, rows, outputs] to y.
struct MoveHeadsJob final : Job {
    MoveHeadsJob(const HeadProductsCall& call, Element* gathered, const Element* products)
        : call(call), gathered(gathered), products(products) {}

    int64_t chunks() const { return (call.rows + HEADS_CHUNK_ROWS - 1) / HEADS_CHUNK_ROWS; }

    void run(int64_t chunk, int64_t) const override {
        for (int64_t row = chunk * HEADS_CHUNK_ROWS; row < std::min((chunk + 1) * HEADS_CHUNK_ROWS, call.rows); row++)
            products ? finish(row) : gather(row);
    }

  private:
    void gather(int64_t row) const {
        const int64_t inputs = call.shape.inputs, width = inputs + call.kept;
        for (int64_t head = 0; head < call.heads; head++)
            std::copy_n(call.x + (row * call.heads + head) * width, inputs,
                gathered + (head * call.rows + row) * inputs);
    }

    void finish(int64_t row) const {
        const int64_t inputs = call.shape.inputs, outputs = call.shape.outputs, width = outputs + call.kept;
        Element* to = call.y + row * (call.heads + (call.last ? 1 : 0)) * width;
        for (int64_t head = 0; head < call.heads; head++, to += width) {
            std::copy_n(products + (head * call.rows + row) * outputs, outputs, to);
            std::copy_n(call.x + (row * call.heads + head) * (inputs + call.kept) + inputs, call.kept, to + outputs);
        }
        if (call.last) std::copy_n(call.last + row * width, width, to);
    }

    const HeadProductsCall& call;
    Element* const gathered;
    const Element* const products;
};

void run_heads(ThreadPool& pool, const HeadProductsCall& call) {
    static thread_local std::vector<Element> gathered, products;
    static thread_local std::vector<WeightRows> groups;
    const int64_t all = call.heads * call.rows;
    if ((int64_t)gathered.size() < all * call.shape.inputs) gathered.resize(all * call.shape.inputs);
    if ((int64_t)products.size() < all * call.shape.outputs) products.resize(all * call.shape.outputs);
    groups.clear();
    for (int64_t head = 0; head < call.heads; head++)
        groups.push_back({call.weights[head], nullptr, head * call.rows, call.rows});
    const MoveHeadsJob gather(call, gathered.data(), nullptr), finish(call, nullptr, products.data());
    pool.run(gather, gather.chunks());
    LinearCall linear{gathered.data(), call.shape};
    linear.y = products.data(), linear.rows = all, linear.epilogue = Epilogue::none;
    grouped_linear(pool, linear, groups);
    pool.run(finish, finish.chunks());
}

}  // namespace

void head_products(ThreadPool& pool, const HeadProductsCall& call) {
    const int64_t most = std::max(GATHERED_ROWS / call.heads, HEADS_CHUNK_ROWS);
    const int64_t x_width = call.heads * (call.shape.inputs + call.kept), width = call.shape.outputs + call.kept;
    for (int64_t row = 0; row < call.rows; row += most) {
        HeadProductsCall block = call;
        block.x += row * x_width, block.y += row * (call.heads + (call.last ? 1 : 0)) * width;
        if (call.last) block.last += row * width;
        block.rows = std::min(call.rows - row, most);
        run_heads(pool, block);
    }
}

}  // namespace tgi
