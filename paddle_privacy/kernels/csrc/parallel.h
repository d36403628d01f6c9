// A parallel loop that needs one entry point of the OpenMP runtime, GOMP_parallel.
//
// Paddle ships libiomp5, whose GNU interface lacks the loop functions that newer compilers call (GOMP_loop_nonmonotonic_
// *). They then bind to whatever libgomp happens to be in the process, which knows nothing of the team, and every
// thread runs the whole loop: noise would be added once a thread. Threads take tasks from a counter instead, so that a
// task runs exactly once whatever the runtime does.
#pragma once

#include <atomic>
#include <cstdint>

namespace paddle_privacy {

template <typename Task>
void parallel_for(int64_t count, const Task& task) {
  if (count <= 1) {
    if (count == 1) task(int64_t{0});
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel
  {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(i);
  }
}

}  // namespace paddle_privacy
