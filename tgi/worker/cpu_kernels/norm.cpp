// Norms of rows, in float32. See norm.h.
#include "norm.h"

#include <cmath>

#include "simd.h"

namespace tgi {
namespace {

constexpr int64_t CHUNK_ROWS = 8;  // rows of a chunk

struct WholeVector {
    template <class T>
    Float load(const T* at) const {
        return tgi::load(at);
    }
    void store(Element* at, Float x) const { tgi::store(at, x); }
    Float kept(Float x) const { return x; }
};

// The last vector of a part. Its other lanes are 0 when loaded and `kept`.
struct FirstLanes {
    template <class T>
    Float load(const T* at) const {
        return load_first(at, count);
    }
    void store(Element* at, Float x) const { store_first(at, x, count); }
    Float kept(Float x) const { return select(first_lanes(count), x, zeros()); }

    int64_t count;
};

struct NormJob final : Job {
    explicit NormJob(const NormCall& call) : call(call) {}

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = (chunk + 1) * CHUNK_ROWS < call.rows ? (chunk + 1) * CHUNK_ROWS : call.rows;
        for (int64_t row = chunk * CHUNK_ROWS; row < last; row++)
            for (int64_t part = 0; part < call.parts; part++) one(row * call.step + part * call.size, part * call.size);
    }

    // The part from element `from` on; `scales` is the index of its first weight.
    void one(int64_t from, int64_t scales) const {
        const Element* x = call.x + from;
        Element* y = call.y + from;
        const float mean = call.centred ? total<false>(x, 0.f) / call.size : 0.f;
        const Float middle = broadcast(mean);
        const Float scale = broadcast(1.f / std::sqrt(total<true>(x, mean) / call.size + call.epsilon));
        each_vector([&](int64_t at, auto first) {
            Float z = (first.load(x + at) - middle) * scale * first.load(call.weight + scales + at);
            if (call.bias) z = z + first.load(call.bias + scales + at);
            first.store(y + at, z);
        });
    }

    // The sum of x - mean, or of its squares.
    template <bool squares>
    float total(const Element* x, float mean) const {
        Float sum = zeros();
        each_vector([&](int64_t at, auto first) {
            const Float z = first.kept(first.load(x + at) - broadcast(mean));
            sum = squares ? fma(z, z, sum) : sum + z;
        });
        return reduce_add(sum);
    }

    // Calls `use` with the index of each vector of a part and a WholeVector or FirstLanes.
    template <class Use>
    void each_vector(const Use& use) const {
        int64_t at = 0;
        for (; at + LANES <= call.size; at += LANES) use(at, WholeVector());
        if (at < call.size) use(at, FirstLanes{call.size - at});
    }

    const NormCall call;
};

}  // namespace

void norm(ThreadPool& pool, const NormCall& call) { pool.run(NormJob(call), (call.rows + CHUNK_ROWS - 1) / CHUNK_ROWS); }

}  // namespace tgi
