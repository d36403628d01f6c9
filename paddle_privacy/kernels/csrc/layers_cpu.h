// Per-sample quantities of embedding and normalisation layers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "parallel.h"
#include "rows_cpu.h"
#include "simd.h"

namespace paddle_privacy {

// Squared norm of a sample's gradient of an embedding table: positions with the same id are summed first.
inline double embedding_sample(const int64_t* ids, const float* g, int64_t steps, int64_t width,
                               std::vector<std::pair<int64_t, int64_t>>& order, std::vector<float>& total) {
  order.clear();
  for (int64_t t = 0; t < steps; ++t) order.emplace_back(ids[t], t);
  std::sort(order.begin(), order.end());
  double squared = 0;
  for (int64_t begin = 0, end; begin < steps; begin = end) {
    for (end = begin + 1; end < steps && order[end].first == order[begin].first;) ++end;
    const float* row = g + order[begin].second * width;
    if (end - begin > 1) {
      std::memcpy(total.data(), row, sizeof(float) * width);
      for (int64_t i = begin + 1; i < end; ++i) add_row_f32(total.data(), g + order[i].second * width, 1.0f, width);
      row = total.data();
    }
    squared += squares_f32(row, width);
  }
  return squared;
}

inline void embedding_norm_cpu(const int64_t* ids, const float* g, int64_t batch, int64_t steps, int64_t width,
                               double* squared) {
  parallel_for(batch, [&](int64_t i) {
    std::vector<std::pair<int64_t, int64_t>> order;
    std::vector<float> total(static_cast<size_t>(width));
    squared[i] = embedding_sample(ids + i * steps, g + i * steps * width, steps, width, order, total);
  });
}

// table[id] += sum of c[i] * g[i, t] over positions with that id; `table` starts at zero. A task owns the ids with one
// residue, so that the order of additions does not depend on the threads.
inline void embedding_sum_cpu(const int64_t* ids, const float* g, const double* c, int64_t batch, int64_t steps,
                              int64_t width, float* table) {
  constexpr int64_t kTasks = 64;
  parallel_for(kTasks, [&](int64_t task) {
    for (int64_t i = 0; i < batch; ++i) {
      const float weight = static_cast<float>(c[i]);
      if (weight == 0) continue;
      for (int64_t t = 0; t < steps; ++t) {
        const int64_t id = ids[i * steps + t];
        if (id % kTasks == task) add_row_f32(table + id * width, g + (i * steps + t) * width, weight, width);
      }
    }
  });
}

PP_CLONES inline void mean_and_scale(const float* x, int64_t width, float epsilon, bool centered, float& mean,
                                     float& scale) {
  double sum[16] = {0}, squares[16] = {0};
  int64_t k = 0;
  double center = 0;
  if (centered) {
    for (; k + 16 <= width; k += 16) {
      for (int j = 0; j < 16; ++j) sum[j] += x[k + j];
    }
    for (; k < width; ++k) sum[0] += x[k];
    for (int j = 0; j < 16; ++j) center += sum[j];
    center /= static_cast<double>(width);
  }
  for (k = 0; k + 16 <= width; k += 16) {
    for (int j = 0; j < 16; ++j) squares[j] += (x[k + j] - center) * (x[k + j] - center);
  }
  for (; k < width; ++k) squares[0] += (x[k] - center) * (x[k] - center);
  double variance = 0;
  for (int j = 0; j < 16; ++j) variance += squares[j];
  mean = static_cast<float>(center);
  scale = static_cast<float>(1.0 / std::sqrt(variance / static_cast<double>(width) + epsilon));
}

PP_CLONES inline void add_normalised(const float* x, const float* g, int64_t width, float mean, float scale,
                                     float* weight, float* bias) {
  for (int64_t k = 0; k < width; ++k) weight[k] += (x[k] - mean) * scale * g[k];
  if (bias != nullptr) {
    for (int64_t k = 0; k < width; ++k) bias[k] += g[k];
  }
}

// weight[i] = sum over t of normalised(x[i, t]) * g[i, t]; bias[i] = sum over t of g[i, t] (unless null).
// `centered`: LayerNorm, else RMSNorm.
inline void norm_layer_cpu(const float* x, const float* g, int64_t batch, int64_t steps, int64_t width, float epsilon,
                           bool centered, float* weight, float* bias) {
  parallel_for(batch, [&](int64_t i) {
    float* w = weight + i * width;
    float* b = bias == nullptr ? nullptr : bias + i * width;
    std::memset(w, 0, sizeof(float) * width);
    if (b != nullptr) std::memset(b, 0, sizeof(float) * width);
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t start = (i * steps + t) * width;
      float mean = 0, scale = 0;
      mean_and_scale(x + start, width, epsilon, centered, mean, scale);
      add_normalised(x + start, g + start, width, mean, scale, w, b);
    }
  });
}

}  // namespace paddle_privacy
