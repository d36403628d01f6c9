// The noise stream on the GPU, with the same updates as noise_ops_cpu.h: a thread makes one ChaCha20 block, sixteen
// threads a row of 256 normals, and for each of the sixteen words their accesses are 64 contiguous bytes.
#pragma once

#include "launch.cuh"

namespace paddle_privacy {
namespace cuda {

// Tensors of one launch; the kernel's parameters must stay below 4 KiB.
constexpr int kTensorsPerLaunch = 24;

struct StepBatch {
  StepTensor tensors[kTensorsPerLaunch];
  int64_t first_row[kTensorsPerLaunch + 1];
  int count;
};

template <typename T>
__device__ inline T noisy_value(T sum, T noise, T grid) {
  const T noisy = sum + noise;
  if (grid == 0) return noisy;
  const T inverse = 1 / grid;
  const T limit = sizeof(T) == 4 ? T(8388608.0) : T(4503599627370496.0);
  return fabs(noisy * inverse) < limit ? to_grid(noisy, grid, inverse) : noisy;
}

template <Rule RULE>
__device__ inline void update_element(const StepTensor& t, int64_t i, float z) {
  const float noise = mul(static_cast<float>(t.std), z);
  if (RULE == Rule::kAddNoise) {
    if (t.sum64 != nullptr) {
      t.sum64[i] = noisy_value(t.sum64[i], __dmul_rn(t.std, static_cast<double>(z)), t.grid);
    } else {
      t.sum[i] = noisy_value(t.sum[i], noise, static_cast<float>(t.grid));
    }
    return;
  }
  const float noisy = t.std > 0 ? noisy_value(t.sum[i], noise, static_cast<float>(t.grid)) : t.sum[i];
  float p = t.param[i];
  const float gradient = noisy / t.divisor + t.l2 * p;
  if (RULE == Rule::kSgd) {
    p -= t.learning_rate * gradient;
  } else if (RULE == Rule::kAdam) {
    const float m = t.beta1 * t.moment1[i] + (1.0f - t.beta1) * gradient;
    const float v = t.beta2 * t.moment2[i] + (1.0f - t.beta2) * gradient * gradient;
    t.moment1[i] = m;
    t.moment2[i] = v;
    p = p * t.decay - t.learning_rate * (m / (sqrtf(v) + t.epsilon));
  } else {
    const float v = t.beta1 * t.moment1[i] + gradient;
    t.moment1[i] = v;
    p -= t.learning_rate * (RULE == Rule::kNesterov ? gradient + t.beta1 * v : v);
  }
  t.param[i] = p;
  if (t.low == nullptr) return;
  if (t.low_is_bfloat16) {
    reinterpret_cast<__nv_bfloat16*>(t.low)[i] = __float2bfloat16_rn(p);
  } else {
    reinterpret_cast<__half*>(t.low)[i] = __float2half_rn(p);
  }
}

template <Rule RULE>
__global__ void __launch_bounds__(kThreads) noise_step_kernel(const __grid_constant__ StepBatch batch,
                                                              const __grid_constant__ Key key, int draws) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / kBlocksPerRow;
  const int lane = static_cast<int>(index % kBlocksPerRow);
  if (row >= batch.first_row[batch.count]) return;
  int which = 0;
  while (row >= batch.first_row[which + 1]) ++which;
  const StepTensor& t = batch.tensors[which];
  const int64_t local = row - batch.first_row[which];
  if (RULE == Rule::kAddNoise && !(t.std > 0)) return;

  float z[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) z[i] = 0;
  if (t.std > 0) {
    float pair[16];
    for (int draw = 0; draw < draws; ++draw) {
      uint32_t words[16];
      chacha20_block(key, t.block + static_cast<uint64_t>(local) * kBlocksPerRow + lane, draw, words);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float first, second;
        box_muller(words[i], words[i + 8], first, second);
        // Four draws are added in pairs, (0 + 1) + (2 + 3), as on the CPU.
        if (draw % 2 == 0) {
          pair[i] = first, pair[i + 8] = second;
        } else {
          pair[i] = add(pair[i], first), pair[i + 8] = add(pair[i + 8], second);
        }
        if (draw % 2 == 1 || draws == 1) {
          z[i] = draw < 2 ? pair[i] : add(z[i], pair[i]);
          z[i + 8] = draw < 2 ? pair[i + 8] : add(z[i + 8], pair[i + 8]);
        }
      }
    }
    if (draws == 4) {
#pragma unroll
      for (int i = 0; i < 16; ++i) z[i] = mul(z[i], 0.5f);
    }
  }
  const int64_t start = local * kNormalsPerRow + lane;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t element = start + i * kBlocksPerRow;
    if (element < t.size) update_element<RULE>(t, element, z[i]);
  }
}

inline const char* launch_noise_step(const StepBatch& batch, Rule rule, const Key& key, int draws,
                                     cudaStream_t stream) {
  const int64_t rows = batch.first_row[batch.count];
  if (rows == 0) return nullptr;
  const auto blocks = static_cast<unsigned>((rows * kBlocksPerRow + kThreads - 1) / kThreads);
  switch (rule) {
    case Rule::kAddNoise:
      noise_step_kernel<Rule::kAddNoise><<<blocks, kThreads, 0, stream>>>(batch, key, draws);
      break;
    case Rule::kSgd:
      noise_step_kernel<Rule::kSgd><<<blocks, kThreads, 0, stream>>>(batch, key, draws);
      break;
    case Rule::kMomentum:
      noise_step_kernel<Rule::kMomentum><<<blocks, kThreads, 0, stream>>>(batch, key, draws);
      break;
    case Rule::kNesterov:
      noise_step_kernel<Rule::kNesterov><<<blocks, kThreads, 0, stream>>>(batch, key, draws);
      break;
    case Rule::kAdam:
      noise_step_kernel<Rule::kAdam><<<blocks, kThreads, 0, stream>>>(batch, key, draws);
      break;
  }
  return launched();
}

}  // namespace cuda
}  // namespace paddle_privacy
