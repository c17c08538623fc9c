// How a product of many rows and panels is divided among threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace tgi {

// A chunk is some rows times some panels. The first ones that are begun have many panels, which are read from end to end,
// and the last ones few, so that all threads are done at about the same time (Hummel, Schonberg and Flynn, 1992).
class Shares {
  public:
    // Chunks of up to `height` rows.
    Shares(int64_t rows, int64_t height, int64_t panels, int64_t threads)
        : rows_(rows), height_(height), groups_((rows + height - 1) / height) {
        for (int64_t left = panels; left > 0;) {
            const int64_t share = (left + 2 * threads - 1) / (2 * threads);
            for (int64_t n = 0; n < threads && left > 0; n++, left -= share) ends_.push_back(left);
        }
        std::reverse(ends_.begin(), ends_.end());
        ends_.insert(ends_.begin(), 0);
    }

    struct Chunk {
        int64_t row, rows, first, last;  // of the panels, the last one is not in it
    };

    int64_t chunks() const { return count() * groups_; }

    Chunk chunk(int64_t number) const {
        const int64_t row = number / count() * height_, share = number % count();
        return {row, std::min(rows_ - row, height_), ends_[share], ends_[share + 1]};
    }

  private:
    int64_t count() const { return ends_.size() - 1; }

    const int64_t rows_, height_, groups_;
    std::vector<int64_t> ends_;  // 0, and the panels before the end of each share
};

}  // namespace tgi
