// What a noise step needs to know about one tensor; shared by the CPU and CUDA kernels and the Paddle binding.
#pragma once

#include <cstdint>

namespace paddle_privacy {

enum class Rule : int { kAddNoise = 0, kSgd = 1, kMomentum = 2, kNesterov = 3, kAdam = 4 };

// `grid` is 0 or a power of two; pointers that the rule does not use are null.
struct StepTensor {
  float* sum = nullptr;
  double* sum64 = nullptr;
  float* param = nullptr;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
  // The float16 or bfloat16 copy of a float32 master parameter.
  uint16_t* low = nullptr;
  bool low_is_bfloat16 = false;
  int64_t size = 0;
  uint64_t block = 0;
  double std = 0;
  double grid = 0;
  float divisor = 1;
  float learning_rate = 0;
  float l2 = 0;
  // 1 - learning_rate * decoupled weight decay
  float decay = 1;
  float beta1 = 0;
  float beta2 = 0;
  float epsilon = 0;
};

enum class Element : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBfloat16 = 3 };

// Per-sample values [rows, columns], row-major and contiguous.
struct Rows {
  const void* data = nullptr;
  Element type = Element::kFloat32;
  int64_t rows = 0;
  int64_t columns = 0;
};

}  // namespace paddle_privacy
