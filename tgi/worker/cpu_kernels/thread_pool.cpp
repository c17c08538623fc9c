// See thread_pool.h.
#include "thread_pool.h"

namespace tgi {

ThreadPool::ThreadPool(int threads, int spins) : spins_(spins) {
    for (int n = 1; n < threads; n++) helpers_.emplace_back([this, n] { helper_loop(n); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        job_number_++;
    }
    wakeup_.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void ThreadPool::run(const Job& job, int64_t chunks) {
    if (chunks == 0) return;
    if (helpers_.empty() || chunks == 1) {
        for (int64_t chunk = 0; chunk < chunks; chunk++) job.run(chunk, 0);
        return;
    }
    job_ = &job;
    unfinished_.store(chunks, std::memory_order_relaxed);
    unclaimed_.store(chunks, std::memory_order_release);
    job_number_.fetch_add(1);
    if (sleeping_.load() && sleeping_.exchange(false)) {
        std::lock_guard<std::mutex> lock(mutex_);
        wakeup_.notify_all();
    }
    run_chunks(0, prefetch_);
    // All remaining chunks are being computed. If a helper loses its core meanwhile, yield this one to it.
    for (int spin = 0; unfinished_.load(std::memory_order_acquire) > 0; spin++) {
        if (prefetch_) prefetch_.prefetch_some();
        else if (spin < spins_) pause();
        else std::this_thread::yield();
    }
}

void ThreadPool::run_chunks(int64_t thread, PrefetchRange& prefetch) {
    int64_t unclaimed = unclaimed_.load(std::memory_order_acquire);
    while (unclaimed > 0) {
        if (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1, std::memory_order_acq_rel)) continue;
        job_->run(unclaimed - 1, thread);
        if (const PrefetchRange next = job_->prefetch_after(thread)) prefetch = next;
        unfinished_.fetch_sub(1, std::memory_order_release);
        unclaimed = unclaimed_.load(std::memory_order_acquire);
    }
}

void ThreadPool::helper_loop(int64_t thread) {
    uint32_t seen = 0;
    PrefetchRange prefetch;
    while (wait_for_job(seen, prefetch)) run_chunks(thread, prefetch);
}

// Waits for a job other than number `seen`. Returns false when the pool is destroyed.
bool ThreadPool::wait_for_job(uint32_t& seen, PrefetchRange& prefetch) {
    for (int spin = 0; spin < spins_ && job_number_.load(std::memory_order_relaxed) == seen; spin++) {
        if (prefetch) prefetch.prefetch_some();
        else pause();
    }
    if (job_number_.load() == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (sleeping_.store(true), job_number_.load() == seen) wakeup_.wait(lock);
    }
    seen = job_number_.load();
    return !stop_;
}

}  // namespace tgi
