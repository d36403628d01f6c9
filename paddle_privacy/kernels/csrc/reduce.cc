#include "clip_cpu.h"
#include "ghost_cpu.h"
#include "kernels.h"
#include "layers_cpu.h"
#include "rows_cpu.h"

namespace paddle_privacy {
namespace cpu {

void row_squared_norms(const Rows& x, double* squared) { row_squares(x, 0, x.rows, squared); }

void weighted_row_sum(const Rows& x, const double* c, void* total) { weighted_sum(x, c, total); }

void clip_and_sum(const std::vector<Rows>& gradients, const std::vector<void*>& sums,
                  const std::vector<double>& clip_norms, bool flat, double* squared, double* factors) {
  clip_and_sum_cpu(gradients, sums, clip_norms, flat, squared, factors);
}

void ghost_squared_norm(const float* a, const float* g, int64_t batch, int64_t steps, int64_t d, int64_t p,
                        double* squared, int isa) {
  ghost_norm_cpu(a, g, batch, steps, d, p, squared, isa < 0 ? best_isa() : std::min(static_cast<Isa>(isa), best_isa()));
}

void embedding_squared_norm(const int64_t* ids, const float* g, int64_t batch, int64_t steps, int64_t width,
                            double* squared) {
  embedding_norm_cpu(ids, g, batch, steps, width, squared);
}

void embedding_weighted_sum(const int64_t* ids, const float* g, const double* c, int64_t batch, int64_t steps,
                            int64_t width, float* table) {
  embedding_sum_cpu(ids, g, c, batch, steps, width, table);
}

void norm_layer_sums(const float* x, const float* g, int64_t batch, int64_t steps, int64_t width, float epsilon,
                     bool centered, float* weight, float* bias) {
  norm_layer_cpu(x, g, batch, steps, width, epsilon, centered, weight, bias);
}

}  // namespace cpu
}  // namespace paddle_privacy
