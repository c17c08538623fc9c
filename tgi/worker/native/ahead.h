// How a block's keys and values come from memory in time: they are asked for while the block before is computed.
#pragma once
#include "cache.h"
#include "product.h"

namespace tgi {

// The keys and values of one head in one or two pages, which will be needed soon.
//
// Pages lie anywhere, and the processor by itself looks ahead within 4 KB alone, so the beginning of each page would be
// waited for. It follows several such stretches at once though, and then gets more from memory than from one after the
// other: so the keys and values of both pages are asked for by turns. `near`: to the first cache, else to the second.
class Ahead {
  public:
    Ahead() = default;

    Ahead(const Cache& cache, const int32_t* pages, int64_t count, int64_t head, bool near)
        : near_(near), stretches_(2 * count), left_(PAGE * cache.head_dim * sizeof(bf16) / (LINES * LINE)) {
        for (int64_t n = 0; n < count; n++) {
            at_[2 * n] = reinterpret_cast<const char*>(keys(cache, pages[n], head));
            at_[2 * n + 1] = reinterpret_cast<const char*>(values(cache, pages[n], head));
        }
    }

    // For a part. A product does so with every 32 x 32 numbers, and so all products of a block ask for all of the next.
    void ask() {
        if (left_ == 0) return;
        left_--;
        for (int64_t n = 0; n < stretches_; n++)
            for (int64_t line = 0; line < LINES; line++, at_[n] += LINE) {
                if (near_) _mm_prefetch(at_[n], _MM_HINT_T0);
                else _mm_prefetch(at_[n], _MM_HINT_T1);
            }
    }

    void ask_all() {
        while (left_) ask();
    }

  private:
    static constexpr int64_t LINES = 8;  // of each stretch at once
    const char* at_[4];
    bool near_ = false;
    int64_t stretches_ = 0, left_ = 0;
};

// The keys of a page, as `product` takes them.
struct Keys {
    const bf16* block() {
        ahead.ask();
        const bf16* found = at;
        at += 32 * PAGE;
        return found;
    }

    const bf16* at;
    Ahead& ahead;
    int64_t step = 2 * PAGE, right = 32;
};

// 32 columns of the values of two pages, as `product` takes them.
struct Values {
    const bf16* block() {
        ahead.ask();
        return pages[next++];
    }

    const bf16* pages[2];
    int64_t step;
    Ahead& ahead;
    int64_t right = 32, next = 0;
};

}  // namespace tgi
