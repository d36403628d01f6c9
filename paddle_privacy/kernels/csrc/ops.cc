// The Paddle binding: unpacks tensors, checks them, calls the kernels. Every result goes into a tensor that the caller
// allocated, so that no operator needs shape inference.
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"
#include "paddle/phi/api/all.h"

// The loader reads this string from the file before it maps it: a library built for another Paddle must not be loaded.
extern "C" __attribute__((used, visibility("default"))) const char paddle_privacy_build[] =
    "paddle_privacy_build=" PP_BUILD_ID;

namespace pp = paddle_privacy;
using paddle::Tensor;

namespace {

pp::Key key_of(const Tensor& key) {
  PD_CHECK(key.is_cpu() && key.dtype() == paddle::DataType::INT64 && key.numel() == 4, "key must be int64 [4] on CPU");
  pp::Key words;
  std::memcpy(words.words, key.data<int64_t>(), sizeof words.words);
  return words;
}

// Columns of a step's specification, one row a tensor.
enum Column { kStd, kGrid, kDivisor, kLearningRate, kL2, kDecay, kBeta1, kBeta2, kEpsilon, kColumns };

// `tensors`: sums, then (unless the rule only adds noise) parameters, first moments, second moments, each as many as
// there are sums, where the rule has them; then the narrow copies of master parameters if there are any.
void noise_step(std::vector<Tensor>& tensors, const Tensor& key, const Tensor& spec, const std::vector<int64_t>& blocks,
                int rule_number, int draws, int isa) {
  const auto rule = static_cast<pp::Rule>(rule_number);
  const size_t count = blocks.size();
  PD_CHECK(spec.is_cpu() && spec.dtype() == paddle::DataType::FLOAT64 &&
               spec.numel() == static_cast<int64_t>(count * kColumns),
           "spec must be float64 [tensors, 9] on CPU");
  const size_t moments = rule == pp::Rule::kAdam ? 2 : rule >= pp::Rule::kMomentum ? 1 : 0;
  const size_t groups = rule == pp::Rule::kAddNoise ? 1 : 2 + moments;
  const bool has_low = tensors.size() == (groups + 1) * count && rule != pp::Rule::kAddNoise;
  PD_CHECK(has_low || tensors.size() == groups * count, "wrong number of tensors for the rule");
  const double* columns = spec.data<double>();
  std::vector<pp::StepTensor> steps(count);
  for (size_t i = 0; i < count; ++i, columns += kColumns) {
    pp::StepTensor& step = steps[i];
    Tensor& sum = tensors[i];
    step.size = sum.numel();
    step.block = static_cast<uint64_t>(blocks[i]);
    step.std = columns[kStd];
    step.grid = columns[kGrid];
    if (rule == pp::Rule::kAddNoise && sum.dtype() == paddle::DataType::FLOAT64) {
      step.sum64 = sum.data<double>();
      continue;
    }
    const auto as_float = [&](size_t group) {
      Tensor& t = tensors[group * count + i];
      PD_CHECK(t.dtype() == paddle::DataType::FLOAT32 && t.numel() == step.size, "expected float32 of the sum's size");
      return t.data<float>();
    };
    step.sum = as_float(0);
    if (rule == pp::Rule::kAddNoise) continue;
    step.param = as_float(1);
    if (moments >= 1) step.moment1 = as_float(2);
    if (moments >= 2) step.moment2 = as_float(3);
    if (has_low) {
      Tensor& low = tensors[groups * count + i];
      step.low_is_bfloat16 = low.dtype() == paddle::DataType::BFLOAT16;
      PD_CHECK(low.numel() == step.size && (step.low_is_bfloat16 || low.dtype() == paddle::DataType::FLOAT16),
               "expected the float16 or bfloat16 copy of the parameter");
      step.low = static_cast<uint16_t*>(low.data());
    }
    step.divisor = static_cast<float>(columns[kDivisor]);
    step.learning_rate = static_cast<float>(columns[kLearningRate]);
    step.l2 = static_cast<float>(columns[kL2]);
    step.decay = static_cast<float>(columns[kDecay]);
    step.beta1 = static_cast<float>(columns[kBeta1]);
    step.beta2 = static_cast<float>(columns[kBeta2]);
    step.epsilon = static_cast<float>(columns[kEpsilon]);
  }
  for (const Tensor& t : tensors) PD_CHECK(t.is_cpu(), "this build serves CPU tensors only");
  pp::cpu::noise_step(steps, rule, key_of(key), draws, isa);
}

}  // namespace

PD_BUILD_OP(paddle_privacy_noise_step)
    .Inputs({paddle::Vec("Tensors"), "Key", "Spec"})
    .Outputs({paddle::Vec("TensorsOut")})
    .Attrs({"blocks: std::vector<int64_t>", "rule: int", "draws: int", "isa: int"})
    .SetInplaceMap({{paddle::Vec("Tensors"), paddle::Vec("TensorsOut")}})
    .SetKernelFn(PD_KERNEL(noise_step));
