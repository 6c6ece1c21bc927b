// A few threads that compute one job together: they meet at barriers, and sleep between jobs.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define SAMOVAR_PAUSE() _mm_pause()
#else
#define SAMOVAR_PAUSE() std::atomic_signal_fence(std::memory_order_seq_cst)
#endif

constexpr int SPINS = 1000;  // some ten microseconds: what a meeting usually takes; then the thread sleeps

class Barrier {
  public:
    explicit Barrier(int members) : members_(members) {}

    void meet() {
        if (members_ == 1) return;
        unsigned turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            turn_.notify_all();
            return;
        }
        for (int spin = 0; spin < SPINS; spin++) {
            if (turn_.load(std::memory_order_acquire) != turn) return;
            SAMOVAR_PAUSE();
        }
        while (turn_.load(std::memory_order_acquire) == turn) turn_.wait(turn, std::memory_order_acquire);
    }

  private:
    const int members_;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> turn_{0};  // goes round
};

// The caller is a member: `members - 1` threads are started. A job must not throw.
class Crew {
  public:
    using Job = std::function<void(int member)>;

    explicit Crew(int members) : members_(members), barrier_(members), finish_(members) {
        try {
            for (int member = 1; member < members; member++)
                threads_.emplace_back([this, member] { serve(member); });
        } catch (...) {
            abandon();
            throw;
        }
    }

    ~Crew() { abandon(); }

    int members() const { return members_; }

    // Runs `job` on every member, and returns when all are through.
    void run(const Job& job) {
        std::lock_guard<std::mutex> one_at_a_time(mutex_);
        job_ = &job;
        wake();
        job(0);
        finish_.meet();
    }

    // Waits, inside a job, until all members are here.
    void meet() { barrier_.meet(); }

  private:
    void wake() {
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }

    void serve(int member) {
        for (int seen = 0;;) {
            while (jobs_.load(std::memory_order_acquire) == seen) jobs_.wait(seen, std::memory_order_acquire);
            seen = jobs_.load(std::memory_order_acquire);
            if (is_over_.load(std::memory_order_acquire)) return;
            (*job_)(member);
            finish_.meet();
        }
    }

    void abandon() {
        is_over_.store(true, std::memory_order_release);
        wake();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

    const int members_;
    Barrier barrier_, finish_;
    std::atomic<int> jobs_{0};
    std::atomic<bool> is_over_{false};
    const Job* job_ = nullptr;
    std::mutex mutex_;
    std::vector<std::thread> threads_;
};

// Shares out the items of a job's phases: whoever is free takes the next. Made anew for each job.
class Shares {
  public:
    Shares(Crew& crew, long phases) : crew_(crew), next_(phases) {}

    // Calls `body(item)` for the items that this member takes of phase number `phase`; then all meet.
    template <class Body>
    void each(long phase, long items, Body&& body) {
        std::atomic<long>& next = next_[phase];
        for (long item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(item);
        crew_.meet();
    }

  private:
    Crew& crew_;
    std::vector<std::atomic<long>> next_;
};
