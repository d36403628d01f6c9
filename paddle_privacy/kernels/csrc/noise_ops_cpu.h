// Gaussian noise onto sums of clipped gradients, and the optimizer update in the same pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "noise_cpu.h"
#include "parallel.h"
#include "step_tensor.h"

namespace paddle_privacy {

// Rows of one task: 8192 normals, some 15 microseconds.
constexpr int64_t kRowsPerTask = 32;

template <typename T>
PP_INLINE void add_noise_to(T* sum, const float* z, int n, T std, T grid) {
  if (grid == 0) {
    for (int i = 0; i < n; ++i) sum[i] += std * z[i];
    return;
  }
  const T inverse = 1 / grid, limit = sizeof(T) == 4 ? T(8388608.0) : T(4503599627370496.0);
  for (int i = 0; i < n; ++i) {
    const T noisy = sum[i] + std * z[i];
    const T cells = noisy * inverse;
    // Beyond the limit every float is a multiple of the grid already, and the product may overflow.
    const T rounded = (sizeof(T) == 4 ? T(__builtin_rintf(cells)) : T(__builtin_rint(cells))) * grid;
    sum[i] = std::fabs(cells) < limit ? rounded : noisy;
  }
}

PP_CLONES inline void add_noise_f32(float* sum, const float* z, int n, float std, float grid) {
  add_noise_to(sum, z, n, std, grid);
}
PP_CLONES inline void add_noise_f64(double* sum, const float* z, int n, double std, double grid) {
  add_noise_to(sum, z, n, std, grid);
}

PP_CLONES inline void sum_of_four(float* z, const float* b, const float* c, const float* d) {
  for (int i = 0; i < kNormalsPerRow; ++i) z[i] = ((z[i] + b[i]) + (c[i] + d[i])) * 0.5f;
}

// g = sum / divisor (+ l2 * p); p -= lr * g.
PP_CLONES inline void sgd(const StepTensor& t, const float* g, float* p, int n) {
  const float lr = t.learning_rate, l2 = t.l2, divisor = t.divisor;
  for (int i = 0; i < n; ++i) p[i] -= lr * (g[i] / divisor + l2 * p[i]);
}

PP_CLONES inline void momentum(const StepTensor& t, const float* g, float* p, float* v, int n, bool nesterov) {
  const float lr = t.learning_rate, l2 = t.l2, divisor = t.divisor, mu = t.beta1;
  if (nesterov) {
    for (int i = 0; i < n; ++i) {
      const float gradient = g[i] / divisor + l2 * p[i];
      v[i] = mu * v[i] + gradient;
      p[i] -= (gradient + mu * v[i]) * lr;
    }
  } else {
    for (int i = 0; i < n; ++i) {
      v[i] = mu * v[i] + (g[i] / divisor + l2 * p[i]);
      p[i] -= lr * v[i];
    }
  }
}

// learning_rate and epsilon arrive bias-corrected; `decay` = 1 - lr * weight_decay (decoupled).
PP_CLONES inline void adam(const StepTensor& t, const float* g, float* p, float* m, float* v, int n) {
  const float lr = t.learning_rate, l2 = t.l2, divisor = t.divisor, b1 = t.beta1, b2 = t.beta2;
  const float epsilon = t.epsilon, decay = t.decay, c1 = 1.0f - b1, c2 = 1.0f - b2;
  for (int i = 0; i < n; ++i) {
    const float gradient = g[i] / divisor + l2 * p[i];
    m[i] = b1 * m[i] + c1 * gradient;
    v[i] = b2 * v[i] + c2 * gradient * gradient;
    p[i] = p[i] * decay - lr * (m[i] / (__builtin_sqrtf(v[i]) + epsilon));
  }
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t to_float16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 puts the value's last bits where float32 rounds.
    float scaled;
    std::memcpy(&scaled, &magnitude, sizeof scaled);
    scaled += 0.5f;
    uint32_t shifted;
    std::memcpy(&shifted, &scaled, sizeof shifted);
    return sign | static_cast<uint16_t>(shifted - 0x3F000000u);
  }
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13);
}

struct RowTask {
  int tensor;
  int64_t first_row;
  int64_t end_row;
};

inline std::vector<RowTask> split_rows(const std::vector<StepTensor>& tensors) {
  std::vector<RowTask> tasks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t rows = (tensors[i].size + kNormalsPerRow - 1) / kNormalsPerRow;
    for (int64_t row = 0; row < rows; row += kRowsPerTask) {
      tasks.push_back({static_cast<int>(i), row, std::min(rows, row + kRowsPerTask)});
    }
  }
  return tasks;
}

inline void update_row(const StepTensor& t, Rule rule, int64_t start, int n, const float* z) {
  if (rule == Rule::kAddNoise) {
    if (t.sum64 != nullptr) {
      add_noise_f64(t.sum64 + start, z, n, t.std, t.grid);
    } else {
      add_noise_f32(t.sum + start, z, n, static_cast<float>(t.std), static_cast<float>(t.grid));
    }
    return;
  }
  float g[kNormalsPerRow];
  std::memcpy(g, t.sum + start, sizeof(float) * n);
  if (z != nullptr) add_noise_f32(g, z, n, static_cast<float>(t.std), static_cast<float>(t.grid));
  float* p = t.param + start;
  if (rule == Rule::kSgd) {
    sgd(t, g, p, n);
  } else if (rule == Rule::kAdam) {
    adam(t, g, p, t.moment1 + start, t.moment2 + start, n);
  } else {
    momentum(t, g, p, t.moment1 + start, n, rule == Rule::kNesterov);
  }
  if (t.low != nullptr) {
    for (int i = 0; i < n; ++i) t.low[start + i] = t.low_is_bfloat16 ? to_bfloat16(p[i]) : to_float16(p[i]);
  }
}

// One step over all tensors. `std` must already be rounded up to float where the sum is float.
inline void noise_step_cpu(const std::vector<StepTensor>& tensors, Rule rule, const Key& key, int draws, Isa isa) {
  const std::vector<RowTask> tasks = split_rows(tensors);
  const NormalRow normal_row = normal_row_for(isa);
  const int64_t count = static_cast<int64_t>(tasks.size());
  parallel_for(count, [&](int64_t i) {
    const RowTask task = tasks[i];
    const StepTensor& t = tensors[task.tensor];
    alignas(64) float z[4][kNormalsPerRow];
    for (int64_t row = task.first_row; row < task.end_row; ++row) {
      const uint64_t block = t.block + static_cast<uint64_t>(row) * kBlocksPerRow;
      const int64_t start = row * kNormalsPerRow;
      const int n = static_cast<int>(std::min<int64_t>(kNormalsPerRow, t.size - start));
      if (t.std > 0) {
        for (int draw = 0; draw < draws; ++draw) normal_row(key, block, static_cast<uint64_t>(draw), z[draw]);
        if (draws == 4) sum_of_four(z[0], z[1], z[2], z[3]);
      }
      if (t.std > 0 || rule != Rule::kAddNoise) update_row(t, rule, start, n, t.std > 0 ? z[0] : nullptr);
    }
  });
}

}  // namespace paddle_privacy
