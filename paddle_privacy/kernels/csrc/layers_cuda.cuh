// Per-sample quantities of linear, embedding and normalisation layers, on the GPU.
#pragma once

#include "launch.cuh"

namespace paddle_privacy {
namespace cuda {

constexpr int kTile = 64;
constexpr int kDepthStep = 16;

// One tile of x x^T: rows row.. and columns column.. of one sample [steps, depth], four by four a thread.
__device__ inline void gram_tile(const float* x, int64_t steps, int64_t depth, int64_t row, int64_t column,
                                 float (*left)[kTile + 4], float (*right)[kTile + 4], float (&sums)[4][4]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int ty = thread / 16, tx = thread % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i][j] = 0;
  }
  for (int64_t k0 = 0; k0 < depth; k0 += kDepthStep) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile * kDepthStep / kThreads; ++i) {
      const int index = thread + i * kThreads;
      const int position = index / kDepthStep, k = index % kDepthStep;
      const bool inside = k0 + k < depth;
      left[k][position] = inside && row + position < steps ? x[(row + position) * depth + k0 + k] : 0.0f;
      right[k][position] = inside && column + position < steps ? x[(column + position) * depth + k0 + k] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepthStep; ++k) {
      float a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = left[k][ty * 4 + i];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = right[k][tx * 4 + j];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
  }
}

// partial[sample, tile]: tiles on and above the diagonal, counted along columns.
__global__ void __launch_bounds__(kThreads)
    ghost_kernel(const float* a, const float* g, int64_t steps, int64_t d, int64_t p, int64_t tiles, double* partial) {
  __shared__ float left[kDepthStep][kTile + 4], right[kDepthStep][kTile + 4];
  const int64_t pairs = tiles * (tiles + 1) / 2;
  const int64_t sample = blockIdx.x / pairs;
  int64_t rest = blockIdx.x % pairs, tile_column = 0;
  while (rest > tile_column) rest -= ++tile_column;
  const int64_t row = rest * kTile, column = tile_column * kTile;
  float of_a[4][4], of_g[4][4];
  gram_tile(a + sample * steps * d, steps, d, row, column, left, right, of_a);
  gram_tile(g + sample * steps * p, steps, p, row, column, left, right, of_g);
  const int ty = static_cast<int>(threadIdx.x) / 16, tx = static_cast<int>(threadIdx.x) % 16;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t s = row + ty * 4 + i, t = column + tx * 4 + j;
      if (s <= t && t < steps) sum += (s == t ? 1.0 : 2.0) * (static_cast<double>(of_a[i][j]) * of_g[i][j]);
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// squared[sample] = sum of its parts; a sum of signed terms that rounding left just below zero becomes zero.
__global__ void sum_parts_kernel(const double* partial, int64_t samples, int64_t parts, double* squared) {
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (sample >= samples) return;
  double sum = 0;
  for (int64_t i = 0; i < parts; ++i) sum += partial[sample * parts + i];
  squared[sample] = sum < 0 ? 0 : sum;
}

// partial[sample, t]: the squared norm of the sum over positions with t's id, if t is the first of them, else 0.
// One warp a position.
__global__ void __launch_bounds__(kThreads)
    embedding_norm_kernel(const int64_t* ids, const float* g, int64_t batch, int64_t steps, int64_t width,
                          double* partial) {
  const int64_t position = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (position >= batch * steps) return;
  const int64_t first = position / steps * steps, t = position % steps;
  const int64_t* own = ids + first;
  const int64_t id = own[t];
  bool seen = false;
  for (int64_t s = lane; s < t; s += 32) seen = seen || own[s] == id;
  if (__any_sync(0xFFFFFFFFu, seen)) {
    if (lane == 0) partial[position] = 0;
    return;
  }
  double squared = 0;
  for (int64_t k = lane; k < width; k += 32) {
    float sum = g[position * width + k];
    for (int64_t s = t + 1; s < steps; ++s) {
      if (own[s] == id) sum += g[(first + s) * width + k];
    }
    squared += static_cast<double>(sum) * sum;
  }
  squared = warp_sum(squared);
  if (lane == 0) partial[position] = squared;
}

__global__ void __launch_bounds__(kThreads)
    embedding_sum_kernel(const int64_t* ids, const float* g, const double* c, int64_t batch, int64_t steps,
                         int64_t width, float* table) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= batch * steps * width) return;
  const int64_t position = index / width;
  const float weight = static_cast<float>(c[position / steps]);
  if (weight != 0) atomicAdd(table + ids[position] * width + index % width, weight * g[index]);
}

// Mean and 1 / sqrt(variance + epsilon) of every row; one warp a row.
__global__ void __launch_bounds__(kThreads)
    row_moments_kernel(const float* x, int64_t rows, int64_t width, float epsilon, bool centered, float2* moments) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= rows) return;
  const float* data = x + row * width;
  double mean = 0;
  if (centered) {
    for (int64_t k = lane; k < width; k += 32) mean += data[k];
    mean = __shfl_sync(0xFFFFFFFFu, warp_sum(mean), 0) / static_cast<double>(width);
  }
  double variance = 0;
  for (int64_t k = lane; k < width; k += 32) variance += (data[k] - mean) * (data[k] - mean);
  variance = warp_sum(variance) / static_cast<double>(width);
  if (lane == 0) {
    moments[row] = make_float2(static_cast<float>(mean), static_cast<float>(1.0 / sqrt(variance + epsilon)));
  }
}

__global__ void __launch_bounds__(kThreads)
    norm_layer_kernel(const float* x, const float* g, const float2* moments, int64_t steps, int64_t width,
                      float* weight, float* bias) {
  const int64_t columns = (width + kThreads - 1) / kThreads;
  const int64_t sample = blockIdx.x / columns;
  const int64_t k = blockIdx.x % columns * kThreads + threadIdx.x;
  if (k >= width) return;
  float w = 0, b = 0;
  for (int64_t t = 0; t < steps; ++t) {
    const int64_t row = sample * steps + t;
    const float gradient = g[row * width + k];
    w += (x[row * width + k] - moments[row].x) * moments[row].y * gradient;
    b += gradient;
  }
  weight[sample * width + k] = w;
  if (bias != nullptr) bias[sample * width + k] = b;
}

}  // namespace cuda
}  // namespace paddle_privacy
