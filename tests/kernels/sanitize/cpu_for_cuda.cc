// The CPU kernels behind the names of the CUDA ones, so that the CUDA harness's tests run over them: on heap blocks of
// the exact size, for the sanitizers. PP_ISA = 0, 1 or 2 chooses the instruction set.
#include <cstdlib>

#include "cuda_kernels.h"
#include "kernels.h"

namespace paddle_privacy {
namespace cuda {

namespace {

int chosen_isa() {
  const char* asked = std::getenv("PP_ISA");
  return asked == nullptr ? -1 : std::atoi(asked);
}

}  // namespace

const char* noise_step(const std::vector<StepTensor>& tensors, Rule rule, const Key& key, int draws, int,
                       cudaStream_t) {
  cpu::noise_step(tensors, rule, key, draws, chosen_isa());
  return nullptr;
}
const char* row_squared_norms(const Rows& x, double* squared, cudaStream_t) {
  cpu::row_squared_norms(x, squared);
  return nullptr;
}
const char* weighted_row_sum(const Rows& x, const double* c, void* total, cudaStream_t) {
  cpu::weighted_row_sum(x, c, total);
  return nullptr;
}
const char* clip_and_sum(const std::vector<Rows>& gradients, const std::vector<void*>& sums,
                         const std::vector<double>& clip_norms, bool flat, double* squared, double* factors,
                         cudaStream_t) {
  cpu::clip_and_sum(gradients, sums, clip_norms, flat, squared, factors);
  return nullptr;
}
const char* ghost_squared_norm(const float* a, const float* g, int64_t batch, int64_t steps, int64_t d, int64_t p,
                               double* squared, int, cudaStream_t) {
  cpu::ghost_squared_norm(a, g, batch, steps, d, p, squared, chosen_isa());
  return nullptr;
}
const char* embedding_squared_norm(const int64_t* ids, const float* g, int64_t batch, int64_t steps, int64_t width,
                                   double* squared, cudaStream_t) {
  cpu::embedding_squared_norm(ids, g, batch, steps, width, squared);
  return nullptr;
}
const char* embedding_weighted_sum(const int64_t* ids, const float* g, const double* c, int64_t batch, int64_t steps,
                                   int64_t width, float* table, cudaStream_t) {
  cpu::embedding_weighted_sum(ids, g, c, batch, steps, width, table);
  return nullptr;
}
const char* norm_layer_sums(const float* x, const float* g, int64_t batch, int64_t steps, int64_t width, float epsilon,
                            bool centered, float* weight, float* bias, cudaStream_t) {
  cpu::norm_layer_sums(x, g, batch, steps, width, epsilon, centered, weight, bias);
  return nullptr;
}

}  // namespace cuda
}  // namespace paddle_privacy
