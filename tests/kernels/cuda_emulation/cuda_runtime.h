// Enough of CUDA to run the kernels on a CPU: a block's threads are coroutines that take turns at barriers.
//
// This checks indices, bounds, reductions and formulas. It says nothing about speed, memory ordering or races: only one
// coroutine runs at a time.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __grid_constant__
#define __shared__ static

struct dim3_like {
  unsigned x;
};
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
using std::isfinite;
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rd(double x) {
  const float rounded = static_cast<float>(x);
  return rounded <= x ? rounded : std::nextafter(rounded, -INFINITY);
}
inline void atomicAdd(float* target, float value) { *target += value; }

namespace emulation {

inline dim3_like block, thread;

struct Coroutine {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  int waits_for = 0;  // 0 runs, 1 block barrier, 2 warp barrier
};

inline std::vector<Coroutine> threads;
inline ucontext_t scheduler;
inline void (*body)(const void*) = nullptr;
inline const void* arguments = nullptr;
inline double exchange[1024];

inline void enter() {
  body(arguments);
  threads[thread.x].done = true;
  swapcontext(&threads[thread.x].context, &scheduler);
}

inline void wait(int what) {
  const unsigned own = thread.x;
  threads[own].waits_for = what;
  swapcontext(&threads[own].context, &scheduler);
  thread.x = own;
}

// Lifts a barrier at which every live thread of the range waits.
inline bool release(size_t first, size_t last, int what) {
  bool any = false;
  for (size_t i = first; i < last; ++i) {
    if (threads[i].done) continue;
    if (threads[i].waits_for != what) return false;
    any = true;
  }
  for (size_t i = first; i < last; ++i) threads[i].waits_for = 0;
  return any;
}

inline void run_block(unsigned size) {
  threads = std::vector<Coroutine>(size);
  for (Coroutine& t : threads) {
    getcontext(&t.context);
    t.stack.reset(new char[64 << 10]);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = 64 << 10;
    t.context.uc_link = &scheduler;
    makecontext(&t.context, enter, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    bool moved = false;
    for (unsigned i = 0; i < size; ++i) {
      if (threads[i].done || threads[i].waits_for != 0) continue;
      thread.x = i;
      swapcontext(&scheduler, &threads[i].context);
      moved = true;
    }
    for (const Coroutine& t : threads) alive = alive || !t.done;
    for (size_t warp = 0; warp < size; warp += 32) moved = release(warp, min<size_t>(size, warp + 32), 2) || moved;
    moved = release(0, size, 1) || moved;
    if (alive && !moved) std::abort();  // a barrier that not every thread reaches
  }
}

template <typename Kernel>
void launch(unsigned blocks, unsigned size, const Kernel& kernel) {
  body = [](const void* k) { (*static_cast<const Kernel*>(k))(); };
  arguments = &kernel;
  for (unsigned i = 0; i < blocks; ++i) {
    block.x = i;
    run_block(size);
  }
}

}  // namespace emulation

#define blockIdx emulation::block
#define threadIdx emulation::thread
#define blockDim (dim3_like{static_cast<unsigned>(emulation::threads.size())})

inline void __syncthreads() { emulation::wait(1); }
inline double shuffle_from(double x, unsigned source) {
  const unsigned own = threadIdx.x;
  emulation::exchange[own] = x;
  emulation::wait(2);
  const double value = emulation::exchange[source];
  emulation::wait(2);
  return value;
}
inline double __shfl_down_sync(unsigned, double x, int offset) {
  const unsigned own = threadIdx.x;
  return shuffle_from(x, own % 32 + offset < 32 ? own + offset : own);
}
inline double __shfl_sync(unsigned, double x, int lane) { return shuffle_from(x, threadIdx.x / 32 * 32 + lane); }
inline bool __any_sync(unsigned, bool x) {
  const unsigned own = threadIdx.x;
  emulation::exchange[own] = x;
  emulation::wait(2);
  bool any = false;
  for (unsigned i = own / 32 * 32; i < own / 32 * 32 + 32; ++i) any = any || emulation::exchange[i] != 0;
  emulation::wait(2);
  return any;
}

using cudaStream_t = void*;
using cudaEvent_t = int;
enum cudaError_t { cudaSuccess = 0, cudaFailure = 1 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
struct cudaDeviceProp {
  char name[64] = "a CPU that plays a GPU";
  int major = 0, minor = 0;
};
inline const char* cudaGetErrorString(cudaError_t) { return "failure"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
// Fresh memory holds NaN, so that whatever a kernel forgets to write is seen.
inline cudaError_t cudaMalloc(void** p, size_t n) {
  *p = std::malloc(n);
  std::memset(*p, 0xFF, n);
  return cudaSuccess;
}
inline cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
inline cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  return std::memcpy(to, from, n), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t = nullptr) {
  return cudaMemcpy(to, from, n, kind);
}
inline cudaError_t cudaMemset(void* p, int value, size_t n) { return std::memset(p, value, n), cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) { return *p = {}, cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* t, cudaEvent_t, cudaEvent_t) { return *t = 1, cudaSuccess; }
