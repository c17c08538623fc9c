// Threads that compute the chunks of a job together, and never wait for one that has not begun.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "lines.h"

namespace tgi {

// A job is chunks 0 .. chunks - 1, begun from the last on, each by any thread; whoever asks for it is thread 0.
class Job {
  public:
    virtual void run(int64_t chunk, int64_t thread) const = 0;

    // What a thread that took part reads first of what comes after the job; nothing if that is not known.
    virtual Early next(int64_t) const { return {}; }

  protected:
    ~Job() = default;
};

// Whoever asks for a job works on it too. A chunk belongs to the thread that claims it, so a helper that has lost its
// core, or still sleeps, delays nobody: the others take its share. Helpers look for the next job for a while, since
// those of one step follow each other within microseconds, and then sleep. One job at a time, asked for by one thread.
// Who waits asks memory for what it will read next.
class Team {
  public:
    Team(int threads, int spins);
    ~Team();
    Team(const Team&) = delete;
    void run(const Job& job, int64_t chunks);
    int64_t threads() const { return helpers_.size() + 1; }

  private:
    void help(int64_t thread);
    void work(int64_t thread, Early& early);
    bool await(uint32_t& seen, Early& early);

    const int spins_;
    Early early_;                     // of thread 0
    const Job* job_ = nullptr;        // stays as long as a chunk of it is claimed and not done
    std::atomic<int64_t> left_{0};    // chunks that nobody has claimed
    std::atomic<int64_t> undone_{0};  // chunks that are not computed
    std::atomic<uint32_t> jobs_{0};
    std::atomic<bool> stop_{false};
    std::atomic<bool> asleep_{false};  // some helper is, and has not been called since
    std::mutex mutex_;
    std::condition_variable call_;
    std::vector<std::thread> helpers_;
};

}  // namespace tgi
