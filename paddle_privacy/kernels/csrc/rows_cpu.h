// Norms and weighted sums over the rows of per-sample gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "step_tensor.h"

namespace paddle_privacy {

// Columns of one task: a partial sum of the squares of 32768 values, or a stretch of the result that stays in L1.
constexpr int64_t kNormColumns = 32768;
constexpr int64_t kSumColumns = 2048;

inline float widen_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen_float16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7FFFu;
  uint32_t bits;
  if (magnitude >= 0x7C00u) {
    bits = 0x7F800000u | ((magnitude & 0x3FFu) << 13);
  } else {
    // Multiplying by 2^112 moves the exponent's bias and makes subnormals normal, exactly.
    const uint32_t shifted = magnitude << 13;
    float scaled;
    std::memcpy(&scaled, &shifted, sizeof scaled);
    scaled *= 5.192296858534828e33f;
    std::memcpy(&bits, &scaled, sizeof bits);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Every product and every sum in double: exact enough at any length, and still bound by memory.
PP_CLONES inline double squares_f32(const float* x, int64_t n) {
  double total[16] = {0};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; ++k) total[k] += static_cast<double>(x[i + k]) * x[i + k];
  }
  for (int k = 0; i < n; ++i, ++k) total[k] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (int k = 0; k < 16; ++k) sum += total[k];
  return sum;
}

PP_CLONES inline double squares_f64(const double* x, int64_t n) {
  double total[16] = {0};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; ++k) total[k] += x[i + k] * x[i + k];
  }
  for (int k = 0; i < n; ++i, ++k) total[k] += x[i] * x[i];
  double sum = 0;
  for (int k = 0; k < 16; ++k) sum += total[k];
  return sum;
}

PP_CLONES inline void add_row_f32(float* total, const float* x, float c, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += c * x[i];
}
PP_CLONES inline void add_row_f64(double* total, const double* x, double c, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += c * x[i];
}
PP_CLONES inline void add_four_rows_f32(float* total, const float* const* x, const float* c, int64_t n) {
  const float *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
  for (int64_t i = 0; i < n; ++i) total[i] += (c[0] * x0[i] + c[1] * x1[i]) + (c[2] * x2[i] + c[3] * x3[i]);
}

PP_CLONES inline void widen_bfloat16_row(const uint16_t* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = widen_bfloat16(x[i]);
}
PP_CLONES inline void widen_float16_row(const uint16_t* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = widen_float16(x[i]);
}

// `n` values starting at element `start`, as float: in place where they are float, else widened into `spare`.
inline const float* as_float(const Rows& x, int64_t start, int64_t n, float* spare) {
  if (x.type == Element::kFloat32) return static_cast<const float*>(x.data) + start;
  const uint16_t* narrow = static_cast<const uint16_t*>(x.data) + start;
  if (x.type == Element::kBfloat16) {
    widen_bfloat16_row(narrow, spare, n);
  } else {
    widen_float16_row(narrow, spare, n);
  }
  return spare;
}

inline double stretch_squares(const Rows& x, int64_t start, int64_t n) {
  if (x.type == Element::kFloat64) return squares_f64(static_cast<const double*>(x.data) + start, n);
  if (x.type == Element::kFloat32) return squares_f32(static_cast<const float*>(x.data) + start, n);
  float spare[kSumColumns];
  double sum = 0;
  for (int64_t i = 0; i < n; i += kSumColumns) {
    const int64_t width = std::min(kSumColumns, n - i);
    sum += squares_f32(as_float(x, start + i, width, spare), width);
  }
  return sum;
}

// squared[i] = sum of squares of row i, rows [first, last). The order of additions does not depend on the threads.
inline void row_squares(const Rows& x, int64_t first, int64_t last, double* squared) {
  const int64_t pieces = (x.columns + kNormColumns - 1) / kNormColumns;
  std::vector<double> partial(static_cast<size_t>((last - first) * pieces));
  parallel_for((last - first) * pieces, [&](int64_t task) {
    const int64_t row = first + task / pieces, start = task % pieces * kNormColumns;
    partial[task] = stretch_squares(x, row * x.columns + start, std::min(kNormColumns, x.columns - start));
  });
  for (int64_t row = first; row < last; ++row) {
    double sum = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += partial[(row - first) * pieces + piece];
    squared[row] = sum;
  }
}

// One stretch of total = (or +=) sum over rows of c[i] * x[i]; rows of weight 0 are not read.
inline void stretch_sum(const Rows& x, const double* c, int64_t first, int64_t last, int64_t start, int64_t n,
                        void* total) {
  if (x.type == Element::kFloat64) {
    const double* data = static_cast<const double*>(x.data);
    for (int64_t row = first; row < last; ++row) {
      if (c[row] != 0) add_row_f64(static_cast<double*>(total) + start, data + row * x.columns + start, c[row], n);
    }
    return;
  }
  float* out = static_cast<float*>(total) + start;
  float spare[4][kSumColumns];
  const float* rows[4];
  float weights[4];
  int waiting = 0;
  for (int64_t row = first; row < last; ++row) {
    const float weight = static_cast<float>(c[row]);
    if (weight == 0) continue;
    rows[waiting] = as_float(x, row * x.columns + start, n, spare[waiting]);
    weights[waiting++] = weight;
    if (waiting == 4) add_four_rows_f32(out, rows, weights, n), waiting = 0;
  }
  for (int k = 0; k < waiting; ++k) add_row_f32(out, rows[k], weights[k], n);
}

inline void weighted_sum(const Rows& x, const double* c, void* total) {
  const size_t width = x.type == Element::kFloat64 ? sizeof(double) : sizeof(float);
  parallel_for((x.columns + kSumColumns - 1) / kSumColumns, [&](int64_t task) {
    const int64_t start = task * kSumColumns, n = std::min(kSumColumns, x.columns - start);
    std::memset(static_cast<char*>(total) + start * width, 0, n * width);
    stretch_sum(x, c, 0, x.rows, start, n, total);
  });
}

// The largest float that keeps factor * norm <= clip_norm; 0 for a norm that is not finite.
inline double clip_factor(double squared_norm, double clip_norm) {
  if (!std::isfinite(squared_norm)) return 0;
  const double norm = std::sqrt(squared_norm);
  if (norm <= clip_norm) return 1;
  const double factor = clip_norm / norm;
  const float rounded = static_cast<float>(factor);
  return rounded <= factor ? rounded : std::nextafter(rounded, 0.0f);
}

}  // namespace paddle_privacy
