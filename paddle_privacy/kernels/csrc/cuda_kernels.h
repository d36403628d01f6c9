// The CUDA kernels as the Paddle binding and the harness call them; the same functions as in kernels.h, on device
// pointers and a stream. They return null, or the CUDA runtime's words when a launch was refused; none of them waits
// for the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "step_tensor.h"
#include "stream.h"

namespace paddle_privacy {
namespace cuda {

const char* noise_step(const std::vector<StepTensor>& tensors, Rule rule, const Key& key, int draws, int isa,
                       cudaStream_t stream);
const char* row_squared_norms(const Rows& x, double* squared, cudaStream_t stream);
const char* weighted_row_sum(const Rows& x, const double* c, void* total, cudaStream_t stream);
const char* clip_and_sum(const std::vector<Rows>& gradients, const std::vector<void*>& sums,
                         const std::vector<double>& clip_norms, bool flat, double* squared, double* factors,
                         cudaStream_t stream);
const char* ghost_squared_norm(const float* a, const float* g, int64_t batch, int64_t steps, int64_t d, int64_t p,
                               double* squared, int isa, cudaStream_t stream);
const char* embedding_squared_norm(const int64_t* ids, const float* g, int64_t batch, int64_t steps, int64_t width,
                                   double* squared, cudaStream_t stream);
const char* embedding_weighted_sum(const int64_t* ids, const float* g, const double* c, int64_t batch, int64_t steps,
                                   int64_t width, float* table, cudaStream_t stream);
const char* norm_layer_sums(const float* x, const float* g, int64_t batch, int64_t steps, int64_t width, float epsilon,
                            bool centered, float* weight, float* bias, cudaStream_t stream);

}  // namespace cuda
}  // namespace paddle_privacy
