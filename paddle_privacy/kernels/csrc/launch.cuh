// Errors, scratch memory and block reductions that the CUDA kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda_kernels.h"

#define PP_TRY(call)                                                       \
  do {                                                                     \
    const cudaError_t status = (call);                                     \
    if (status != cudaSuccess) return cudaGetErrorString(status);          \
  } while (0)

namespace paddle_privacy {
namespace cuda {

constexpr int kThreads = 256;
// Largest y and z of a grid.
constexpr int64_t kGridLimit = 65535;

inline const char* launched() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

// Device memory that is released in stream order when the scope ends.
template <typename T>
class Scratch {
 public:
  Scratch(int64_t size, cudaStream_t stream) : stream_(stream) {
    status_ = cudaMallocAsync(reinterpret_cast<void**>(&data_), std::max<int64_t>(1, size) * sizeof(T), stream);
    if (status_ != cudaSuccess) data_ = nullptr;
  }
  ~Scratch() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  cudaError_t status() const { return status_; }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  cudaStream_t stream_;
  cudaError_t status_;
};

__device__ inline double warp_sum(double x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xFFFFFFFFu, x, offset);
  return x;
}

// Sum over a block of kThreads threads; the result is in thread 0.
__device__ inline double block_sum(double x) {
  __shared__ double partial[kThreads / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kThreads / 32; ++i) total += partial[i];
  }
  return total;
}

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

}  // namespace cuda
}  // namespace paddle_privacy
