// See gate.h.
#include "gate.h"

#include <algorithm>

#include "vector_math.h"

namespace tgi {
namespace {

struct GateJob final : Job {
    GateJob(const Element* x, Element* y, int64_t size) : x(x), y(y), size(size) {}

    int64_t chunks() const { return (size + CHUNK - 1) / CHUNK; }

    void run(int64_t chunk, int64_t) const override {
        const int64_t last = std::min((chunk + 1) * CHUNK, size);
        for (int64_t at = chunk * CHUNK; at < last; at += LANES) {
            const int64_t count = std::min(last - at, LANES);
            const Float gate = sigmoid(at_least(-87.3f, load_first(x + at, count)));
            store_first(y + at, load_first(y + at, count) * gate, count);
        }
    }

    static constexpr int64_t CHUNK = 4096;  // elements of a chunk
    const Element* x;
    Element* y;
    const int64_t size;
};

}  // namespace

void sigmoid_gate(ThreadPool& pool, const Element* x, Element* y, int64_t size) {
    const GateJob job(x, y, size);
    pool.run(job, job.chunks());
}

}  // namespace tgi
