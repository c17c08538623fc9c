// See team.h.
#include "team.h"

namespace tgi {

Team::Team(int threads, int spins) : spins_(spins) {
    for (int n = 1; n < threads; n++) helpers_.emplace_back([this, n] { help(n); });
}

Team::~Team() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        jobs_++;
    }
    call_.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void Team::run(const Job& job, int64_t chunks) {
    if (chunks == 0) return;
    if (helpers_.empty() || chunks == 1) {
        for (int64_t chunk = 0; chunk < chunks; chunk++) job.run(chunk, 0);
        return;
    }
    job_ = &job;
    undone_.store(chunks, std::memory_order_relaxed);
    left_.store(chunks, std::memory_order_release);
    jobs_.fetch_add(1);
    if (asleep_.load() && asleep_.exchange(false)) {
        std::lock_guard<std::mutex> lock(mutex_);
        call_.notify_all();
    }
    work(0, early_);
    // What is left is being computed. A helper that loses its core over it is worth one's own.
    for (int spin = 0; undone_.load(std::memory_order_acquire) > 0; spin++) {
        if (early_) early_.some();
        else if (spin < spins_) _mm_pause();
        else std::this_thread::yield();
    }
}

void Team::work(int64_t thread, Early& early) {
    int64_t left = left_.load(std::memory_order_acquire);
    while (left > 0) {
        if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
        job_->run(left - 1, thread);
        if (const Early next = job_->next(thread)) early = next;
        undone_.fetch_sub(1, std::memory_order_release);
        left = left_.load(std::memory_order_acquire);
    }
}

void Team::help(int64_t thread) {
    uint32_t seen = 0;
    Early early;
    while (await(seen, early)) work(thread, early);
}

// Waits for a job that is not the `seen` one. False: there will be none.
bool Team::await(uint32_t& seen, Early& early) {
    for (int spin = 0; spin < spins_ && jobs_.load(std::memory_order_relaxed) == seen; spin++) {
        if (early) early.some();
        else _mm_pause();
    }
    if (jobs_.load() == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (asleep_.store(true), jobs_.load() == seen) call_.wait(lock);
    }
    seen = jobs_.load();
    return !stop_;
}

}  // namespace tgi
