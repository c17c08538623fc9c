// Memory in large pages, where the system has them: rows that are far apart then need few of its translations.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace tgi {

class Large {
  public:
    Large() = default;
    Large(const Large&) = delete;
    Large& operator=(const Large&) = delete;
    ~Large() { release(); }

    // Other memory of so many bytes, which may hold anything. It begins at a page.
    void* renew(size_t bytes) {
        release();
        bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        // The system puts what is a multiple of its large pages at such an address by itself.
        void* const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(found, bytes, MADV_HUGEPAGE);
#endif
        at_ = found, bytes_ = bytes;
        return at_;
    }

  private:
    static constexpr size_t PAGE_BYTES = 2 << 20;

    void release() {
        if (at_) munmap(at_, bytes_);
        at_ = nullptr;
    }

    void* at_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace tgi
