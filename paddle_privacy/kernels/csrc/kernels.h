// The kernels as the Paddle binding calls them: raw pointers, no Paddle, one namespace a device.
#pragma once

#include <cstdint>
#include <vector>

#include "step_tensor.h"
#include "stream.h"

namespace paddle_privacy {

namespace cpu {

// `isa`: -1 for the best this processor has, or the widest instruction set to use (0 baseline, 1 AVX2, 2 AVX-512).
void noise_step(const std::vector<StepTensor>& tensors, Rule rule, const Key& key, int draws, int isa);

// squared [rows], double.
void row_squared_norms(const Rows& x, double* squared);

// total [columns]: float, or double where x is double; c [rows].
void weighted_row_sum(const Rows& x, const double* c, void* total);

// squared and factors: [rows] when flat, else [tensors, rows]; clip_norms: one, or one a tensor.
void clip_and_sum(const std::vector<Rows>& gradients, const std::vector<void*>& sums,
                  const std::vector<double>& clip_norms, bool flat, double* squared, double* factors);

// a [batch, steps, d], g [batch, steps, p], squared [batch].
void ghost_squared_norm(const float* a, const float* g, int64_t batch, int64_t steps, int64_t d, int64_t p,
                        double* squared, int isa);

// ids [batch, steps], g [batch, steps, width], squared [batch].
void embedding_squared_norm(const int64_t* ids, const float* g, int64_t batch, int64_t steps, int64_t width,
                            double* squared);

// table [*, width] holds zeros on entry; c [batch]; every id lies inside the table.
void embedding_weighted_sum(const int64_t* ids, const float* g, const double* c, int64_t batch, int64_t steps,
                            int64_t width, float* table);

// x and g [batch, steps, width]; weight and bias (null when there is none) [batch, width].
void norm_layer_sums(const float* x, const float* g, int64_t batch, int64_t steps, int64_t width, float epsilon,
                     bool centered, float* weight, float* bias);

}  // namespace cpu

}  // namespace paddle_privacy
