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

}  // namespace cpu

}  // namespace paddle_privacy
