#include "layers_cuda.cuh"
#include "noise_cuda.cuh"
#include "rows_cuda.cuh"

namespace paddle_privacy {
namespace cuda {

namespace {

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

}  // namespace

const char* noise_step(const std::vector<StepTensor>& tensors, Rule rule, const Key& key, int draws, int,
                       cudaStream_t stream) {
  for (size_t start = 0; start < tensors.size(); start += kTensorsPerLaunch) {
    StepBatch batch;
    batch.count = static_cast<int>(std::min<size_t>(kTensorsPerLaunch, tensors.size() - start));
    batch.first_row[0] = 0;
    for (int i = 0; i < batch.count; ++i) {
      batch.tensors[i] = tensors[start + i];
      batch.first_row[i + 1] = batch.first_row[i] + (batch.tensors[i].size + kNormalsPerRow - 1) / kNormalsPerRow;
    }
    const char* error = launch_noise_step(batch, rule, key, draws, stream);
    if (error != nullptr) return error;
  }
  return nullptr;
}

const char* row_squared_norms(const Rows& x, double* squared, cudaStream_t stream) {
  return squares_of(x, false, squared, stream);
}

const char* weighted_row_sum(const Rows& x, const double* c, void* total, cudaStream_t stream) {
  return weighted_sum_of(x, c, total, stream);
}

const char* clip_and_sum(const std::vector<Rows>& gradients, const std::vector<void*>& sums,
                         const std::vector<double>& clip_norms, bool flat, double* squared, double* factors,
                         cudaStream_t stream) {
  if (gradients.empty() || gradients[0].rows == 0) return nullptr;
  const int64_t rows = gradients[0].rows, groups = flat ? 1 : static_cast<int64_t>(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const char* error = squares_of(gradients[i], flat && i > 0, squared + (flat ? 0 : i * rows), stream);
    if (error != nullptr) return error;
  }
  Scratch<double> bounds(groups, stream);
  PP_TRY(bounds.status());
  // From pageable memory: the copy has left it when the call returns.
  PP_TRY(cudaMemcpyAsync(bounds.data(), clip_norms.data(), groups * sizeof(double), cudaMemcpyHostToDevice, stream));
  clip_factors_kernel<<<blocks_for(rows), kThreads, 0, stream>>>(squared, bounds.data(), rows, groups, factors);
  const char* error = launched();
  for (size_t i = 0; i < gradients.size() && error == nullptr; ++i) {
    error = weighted_sum_of(gradients[i], factors + (flat ? 0 : i * rows), sums[i], stream);
  }
  return error;
}

const char* ghost_squared_norm(const float* a, const float* g, int64_t batch, int64_t steps, int64_t d, int64_t p,
                               double* squared, int, cudaStream_t stream) {
  if (batch == 0) return nullptr;
  const int64_t tiles = (steps + kTile - 1) / kTile, pairs = tiles * (tiles + 1) / 2;
  Scratch<double> partial(batch * pairs, stream);
  PP_TRY(partial.status());
  ghost_kernel<<<static_cast<unsigned>(batch * pairs), kThreads, 0, stream>>>(a, g, steps, d, p, tiles, partial.data());
  sum_parts_kernel<<<blocks_for(batch), kThreads, 0, stream>>>(partial.data(), batch, pairs, squared);
  return launched();
}

const char* embedding_squared_norm(const int64_t* ids, const float* g, int64_t batch, int64_t steps, int64_t width,
                                   double* squared, cudaStream_t stream) {
  if (batch == 0) return nullptr;
  Scratch<double> partial(batch * steps, stream);
  PP_TRY(partial.status());
  embedding_norm_kernel<<<blocks_for(batch * steps * 32), kThreads, 0, stream>>>(ids, g, batch, steps, width,
                                                                                 partial.data());
  sum_parts_kernel<<<blocks_for(batch), kThreads, 0, stream>>>(partial.data(), batch, steps, squared);
  return launched();
}

const char* embedding_weighted_sum(const int64_t* ids, const float* g, const double* c, int64_t batch, int64_t steps,
                                   int64_t width, float* table, cudaStream_t stream) {
  const int64_t size = batch * steps * width;
  if (size == 0) return nullptr;
  embedding_sum_kernel<<<blocks_for(size), kThreads, 0, stream>>>(ids, g, c, batch, steps, width, table);
  return launched();
}

const char* norm_layer_sums(const float* x, const float* g, int64_t batch, int64_t steps, int64_t width, float epsilon,
                            bool centered, float* weight, float* bias, cudaStream_t stream) {
  if (batch == 0 || width == 0) return nullptr;
  Scratch<float2> moments(batch * steps, stream);
  PP_TRY(moments.status());
  row_moments_kernel<<<blocks_for(batch * steps * 32), kThreads, 0, stream>>>(x, batch * steps, width, epsilon,
                                                                              centered, moments.data());
  const int64_t columns = (width + kThreads - 1) / kThreads;
  norm_layer_kernel<<<static_cast<unsigned>(batch * columns), kThreads, 0, stream>>>(x, g, moments.data(), steps, width,
                                                                                     weight, bias);
  return launched();
}

}  // namespace cuda
}  // namespace paddle_privacy
