// Compiled with -ffp-contract=off: the stream rounds after every operation.
#include "kernels.h"
#include "noise_ops_cpu.h"

namespace paddle_privacy {
namespace cpu {

void noise_step(const std::vector<StepTensor>& tensors, Rule rule, const Key& key, int draws, int isa) {
  noise_step_cpu(tensors, rule, key, draws, isa < 0 ? best_isa() : std::min(static_cast<Isa>(isa), best_isa()));
}

}  // namespace cpu
}  // namespace paddle_privacy
