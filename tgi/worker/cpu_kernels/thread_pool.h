// A pool of threads that compute the chunks of one job together. No thread waits for a chunk that has not been started.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "prefetch.h"

namespace tgi {

// Tells the core that this thread polls.
inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A job is the chunks 0 .. chunks - 1, started from the last one, each on any thread. The calling thread is thread 0.
class Job {
  public:
    virtual void run(int64_t chunk, int64_t thread) const = 0;

    // The memory that a thread of this job reads first after the job; empty if that is not known.
    virtual PrefetchRange prefetch_after(int64_t) const { return {}; }

  protected:
    ~Job() = default;
};

// The calling thread works on its job too. A chunk belongs to the thread that claims it, so a helper thread that has
// lost its core, or still sleeps, delays no one: the others claim its chunks. Helpers poll for the next job for a
// while, since the jobs of a step follow each other within microseconds, and then sleep. One job at a time, from one
// calling thread. Waiting threads prefetch what they will read next.
class ThreadPool {
  public:
    ThreadPool(int threads, int spins);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    void run(const Job& job, int64_t chunks);
    int64_t threads() const { return helpers_.size() + 1; }

  private:
    void helper_loop(int64_t thread);
    void run_chunks(int64_t thread, PrefetchRange& prefetch);
    bool wait_for_job(uint32_t& seen, PrefetchRange& prefetch);

    const int spins_;
    PrefetchRange prefetch_;  // of thread 0
    const Job* job_ = nullptr;  // valid while a chunk of it is claimed and not finished
    std::atomic<int64_t> unclaimed_{0};  // chunks that no thread has claimed
    std::atomic<int64_t> unfinished_{0};  // chunks that are not computed yet
    std::atomic<uint32_t> job_number_{0};
    std::atomic<bool> stop_{false};
    std::atomic<bool> sleeping_{false};  // a helper sleeps and has not been woken since
    std::mutex mutex_;
    std::condition_variable wakeup_;
    std::vector<std::thread> helpers_;
};

}  // namespace tgi
