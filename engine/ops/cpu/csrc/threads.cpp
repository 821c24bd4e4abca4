#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace cpu_ops {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto SPIN = std::chrono::microseconds(20);
constexpr auto WATCH = std::chrono::microseconds(200);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for done(): first holding the core, then offering it to others. False after `limit`.
template <class Done>
bool watch(Done done, Clock::duration limit) {
  const auto start = Clock::now();
  for (;;) {
    for (int i = 0; i < 32; i++) {
      if (done()) return true;
      pause();
    }
    const auto waited = Clock::now() - start;
    if (waited > limit) return false;
    if (waited > SPIN) sched_yield();
  }
}

// A call is open while workers may join it. All of its state is in one word, so that joining and closing exclude each
// other:   call number | OPEN | workers that joined and have not left
class Pool {
 public:
  void run(int threads, Tasks& tasks, void (*body)(const void*, Tasks&), const void* context) {
    const std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) return body(context, tasks);
    if (workers_.empty()) sched_getaffinity(0, sizeof allowed_, &allowed_);
    while (static_cast<int>(workers_.size()) < threads - 1) {
      std::thread worker([this] { work(); });
      workers_.push_back(worker.native_handle());
      worker.detach();
      shunned_ = NONE;
    }
    shun(sched_getcpu());
    tasks_ = &tasks;
    body_ = body;
    context_ = context;
    limit_ = threads - 1;
    const uint32_t call = calls_.load(std::memory_order_relaxed) + 1;
    state_.store(static_cast<uint64_t>(call) << 32 | OPEN, std::memory_order_release);
    calls_.store(call, std::memory_order_release);
    calls_.notify_all();
    body(context, tasks);
    state_.fetch_and(~OPEN, std::memory_order_relaxed);
    watch([&] { return (state_.load(std::memory_order_acquire) & JOINED) == 0; }, Clock::duration::max());
  }

 private:
  static constexpr uint64_t OPEN = 1ull << 31, JOINED = OPEN - 1;
  static constexpr int NONE = -1;

  // Keeps the workers off the caller's CPU `cpu`, if there is another. A kernel wakes a thread where its waker runs
  // when it takes the thread for light, or the idle CPUs for costly to wake (a guest's halted ones): the two then take
  // turns on one CPU until a tick finds them there, milliseconds later.
  void shun(int cpu) {
    if (cpu == shunned_ || cpu == NONE) return;
    cpu_set_t others = allowed_;
    CPU_CLR(cpu, &others);
    shunned_ = cpu;
    if (CPU_COUNT(&others) == 0) return;
    for (const pthread_t worker : workers_) pthread_setaffinity_np(worker, sizeof others, &others);
  }

  [[noreturn]] void work() {
    uint32_t seen = 0;
    for (;;) {
      const auto called = [&] { return calls_.load(std::memory_order_acquire) != seen; };
      if (!watch(called, WATCH)) calls_.wait(seen, std::memory_order_acquire);
      seen = calls_.load(std::memory_order_acquire);
      if (!join()) continue;
      body_(context_, *tasks_);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  bool join() {
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & OPEN) != 0 && (state & JOINED) < limit_.load(std::memory_order_relaxed))
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) return true;
    return false;
  }

  std::mutex busy_;
  std::vector<pthread_t> workers_;
  cpu_set_t allowed_{};  // the process's CPUs
  int shunned_ = NONE;
  Tasks* tasks_ = nullptr;
  void (*body_)(const void*, Tasks&) = nullptr;
  const void* context_ = nullptr;
  std::atomic<uint64_t> limit_{0};
  std::atomic<uint64_t> state_{0};
  std::atomic<uint32_t> calls_{0};
};

// Never destroyed: workers may outlive static destructors. A forked child has no workers and starts its own.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

void run_tasks(int threads, Tasks& tasks, void (*body)(const void*, Tasks&), const void* context) {
  the_pool().run(threads, tasks, body, context);
}

}  // namespace cpu_ops
