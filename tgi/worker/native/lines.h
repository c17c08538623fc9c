// Cache lines, and how memory is asked for them before they are needed.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace tgi {

constexpr int64_t LINE = 64;  // bytes

// Asks the core's first cache for one.
inline void soon(const uint8_t* at) { _mm_prefetch((const char*)at, _MM_HINT_T0); }

// Asks the second one for so many.
inline void ask(const uint8_t* at, int64_t lines) {
    for (; lines > 0; lines--, at += LINE) _mm_prefetch((const char*)at, _MM_HINT_T1);
}

// What a thread will read next, for which it asks while it waits for the others: memory would rest meanwhile.
class Early {
  public:
    Early() = default;
    Early(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}

    explicit operator bool() const { return at_ < end_; }

    // Asks for a little, so that whoever waits soon looks up again: a core asks for some 16 lines at once, and for more
    // only as these come.
    void some() {
        const int64_t lines = std::min(SOME, (end_ - at_ + LINE - 1) / LINE);
        ask(at_, lines);
        at_ += lines * LINE;
    }

  private:
    static constexpr int64_t SOME = 8;
    const uint8_t *at_ = nullptr, *end_ = nullptr;
};

}  // namespace tgi
