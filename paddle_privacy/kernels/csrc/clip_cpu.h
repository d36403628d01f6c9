// Clip and sum per-sample gradients: norms, factors and weighted sums, a group of samples at a time while it is in
// cache; where not even two samples fit, once over everything for the norms and once for the sums.
#pragma once

#include <algorithm>
#include <vector>

#include "rows_cpu.h"

namespace paddle_privacy {

constexpr int64_t kGroupBytes = 3 << 20;

// squared: [rows] (flat: over all tensors) or [tensors][rows] (per tensor); factors likewise. clip_norms: one, or one
// a tensor. sums[i] has the columns of gradients[i], in float, or double for double.
inline void clip_and_sum_cpu(const std::vector<Rows>& gradients, const std::vector<void*>& sums,
                             const std::vector<double>& clip_norms, bool flat, double* squared, double* factors) {
  if (gradients.empty()) return;
  const int64_t rows = gradients[0].rows, tensors = static_cast<int64_t>(gradients.size());
  int64_t row_bytes = 0;
  for (const Rows& x : gradients) {
    row_bytes += x.columns * (x.type == Element::kFloat64 ? 8 : x.type == Element::kFloat32 ? 4 : 2);
  }
  int64_t group = std::max<int64_t>(1, kGroupBytes / std::max<int64_t>(1, row_bytes));
  if (group < 4) group = std::max<int64_t>(1, rows);

  struct Task {
    int64_t tensor, start, columns;
  };
  std::vector<Task> norm_tasks, sum_tasks;
  for (int64_t i = 0; i < tensors; ++i) {
    for (int64_t start = 0; start < gradients[i].columns; start += kNormColumns) {
      norm_tasks.push_back({i, start, std::min(kNormColumns, gradients[i].columns - start)});
    }
    for (int64_t start = 0; start < gradients[i].columns; start += kSumColumns) {
      sum_tasks.push_back({i, start, std::min(kSumColumns, gradients[i].columns - start)});
    }
  }
  for (int64_t i = 0; i < tensors; ++i) {
    std::memset(sums[i], 0, gradients[i].columns * (gradients[i].type == Element::kFloat64 ? 8 : 4));
  }
  std::fill(squared, squared + (flat ? 1 : tensors) * rows, 0.0);
  const int64_t pieces = static_cast<int64_t>(norm_tasks.size());
  std::vector<double> partial(static_cast<size_t>(group * pieces));
  for (int64_t first = 0; first < rows; first += group) {
    const int64_t last = std::min(rows, first + group);
    parallel_for((last - first) * pieces, [&](int64_t index) {
      const Task& task = norm_tasks[index % pieces];
      const Rows& x = gradients[task.tensor];
      partial[index] = stretch_squares(x, (first + index / pieces) * x.columns + task.start, task.columns);
    });
    for (int64_t row = first; row < last; ++row) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        squared[(flat ? 0 : norm_tasks[piece].tensor * rows) + row] += partial[(row - first) * pieces + piece];
      }
      // A sample that is not finite anywhere counts nowhere: its other layers come from the same broken pass.
      bool finite = true;
      for (int64_t i = 0; i < (flat ? 1 : tensors); ++i) finite = finite && std::isfinite(squared[i * rows + row]);
      for (int64_t i = 0; i < (flat ? 1 : tensors); ++i) {
        factors[i * rows + row] = finite ? clip_factor(squared[i * rows + row], clip_norms[flat ? 0 : i]) : 0.0;
      }
    }
    parallel_for(static_cast<int64_t>(sum_tasks.size()), [&](int64_t index) {
      const Task& task = sum_tasks[index];
      stretch_sum(gradients[task.tensor], factors + (flat ? 0 : task.tensor * rows), first, last, task.start,
                  task.columns, sums[task.tensor]);
    });
  }
}

}  // namespace paddle_privacy
