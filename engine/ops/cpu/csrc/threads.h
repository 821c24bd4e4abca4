// The kernels' threads: independent tasks, handed out in order to whoever is free.
//
// Not OpenMP, whose teams must be complete: there a call waits at its barrier for every thread, also for one that has
// nothing left to do but has lost its core, and threads between calls spin for milliseconds (libgomp) or pay a wake-up
// at each call. On two cores shared with other work, decode steps took five to forty times as long. Here a call starts
// at once; a worker that is awake joins it and takes tasks, a worker that comes late finds it closed and is not waited
// for. Idle workers watch for the next call for 0.2 ms, yielding their core to whoever wants it, then sleep. They keep
// off the CPU that their caller is on.
//
// Tasks must not depend on who runs them or when; so results do not depend on the number of threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace cpu_ops {

// The tasks of one call: next() gives 0, 1, ... count - 1, each to one caller.
class Tasks {
 public:
  explicit Tasks(int64_t count) : count_(count) {}
  bool next(int64_t& task) { return (task = next_.fetch_add(1, std::memory_order_relaxed)) < count_; }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t count_;
};

// Runs body(context, tasks) on this thread and on up to threads - 1 others at the same time; returns when all who
// started have returned. When another call is running, this thread runs alone.
void run_tasks(int threads, Tasks& tasks, void (*body)(const void*, Tasks&), const void* context);

// f(tasks), which is to take tasks until there are none: for work with something to set up first.
template <class F>
void parallel(int threads, int64_t count, const F& f) {
  Tasks tasks(count);
  if (threads == 1 || count <= 1) return f(tasks);
  run_tasks(threads, tasks, [](const void* context, Tasks& t) { (*static_cast<const F*>(context))(t); }, &f);
}

// f(i) for i in 0 .. count - 1, `grain` in a task.
template <class F>
void parallel_for(int threads, int64_t count, int64_t grain, const F& f) {
  parallel(threads, (count + grain - 1) / grain, [&](Tasks& tasks) {
    for (int64_t task; tasks.next(task);)
      for (int64_t i = task * grain; i < (task + 1) * grain && i < count; i++) f(i);
  });
}

}  // namespace cpu_ops
