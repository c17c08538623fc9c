// How a product of many rows and panels is divided among threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace tgi {

// A chunk is some rows times some panels. The first ones that are begun have many panels, which are read from end to end,
// and the last ones few, so that all threads are done at about the same time (Hummel, Schonberg and Flynn, 1992). A chunk
// of few rows takes some microseconds, of which a good part passes until memory brings all that it can: of those there
// are fewer and larger ones.
class Shares {
  public:
    struct Chunk {
        int64_t row, rows, first, last;  // of the panels, the last one is not in it
    };

    // Chunks of up to `height` rows.
    Shares(int64_t rows, int64_t height, int64_t panels, int64_t threads) {
        const int64_t eighths = rows > FEW ? 4 : 7;  // of what is left, for all threads together
        for (int64_t groups = (rows + height - 1) / height; groups > 0; groups--) {
            const int64_t row = (groups - 1) * height;
            for (int64_t left = panels; left > 0;) {
                const int64_t all = left + (groups - 1) * panels, share = (eighths * all + 8 * threads - 1) / (8 * threads);
                for (int64_t n = 0; n < threads && left > 0; n++, left -= share)
                    chunks_.push_back({row, std::min(rows - row, height), std::max<int64_t>(left - share, 0), left});
            }
        }
        std::reverse(chunks_.begin(), chunks_.end());
    }

    int64_t chunks() const { return chunks_.size(); }
    const Chunk& chunk(int64_t number) const { return chunks_[number]; }

  private:
    static constexpr int64_t FEW = 16;

    std::vector<Chunk> chunks_;  // the last one is begun first
};

}  // namespace tgi
