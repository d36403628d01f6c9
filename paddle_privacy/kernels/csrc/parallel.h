// A parallel loop that needs one entry point of the OpenMP runtime, GOMP_parallel.
//
// Paddle ships libiomp5, whose GNU interface lacks the loop functions that newer compilers call (GOMP_loop_nonmonotonic_
// *). They then bind to whatever libgomp happens to be in the process, which knows nothing of the team, and every
// thread runs the whole loop: noise would be added once a thread. Threads take tasks from a counter instead, so that a
// task runs exactly once whatever the runtime does.
//
// A forked child has none of its parent's threads, and libiomp5 may wait for them at the end of a parallel region for
// ever. A child therefore runs every task itself.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace paddle_privacy {

inline std::atomic<bool> in_forked_child{false};
// Registered when the library is loaded, which is before a child can inherit it.
inline const int fork_is_watched = pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });

template <typename Task>
void parallel_for(int64_t count, const Task& task) {
  if (count <= 1 || in_forked_child.load(std::memory_order_relaxed)) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel
  {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(i);
  }
}

}  // namespace paddle_privacy
