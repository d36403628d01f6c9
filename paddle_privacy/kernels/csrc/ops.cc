// The Paddle binding: unpacks tensors, checks them, calls the kernels. Every result goes into a tensor that the caller
// allocated, so that no operator needs shape inference.
#include <cstring>
#include <string>
#include <vector>

#if defined(PP_WITH_CUDA)
#include "cuda_kernels.h"
#endif

#include "kernels.h"
#include "paddle/phi/api/all.h"

// Calls a kernel of the device that `tensor` is on; the CUDA ones take the tensor's current stream as last argument.
#if defined(PP_WITH_CUDA)
#define PP_DISPATCH(tensor, function, ...)                            \
  if ((tensor).is_gpu()) {                                            \
    const char* error = pp::cuda::function(__VA_ARGS__, (tensor).stream()); \
    PD_CHECK(error == nullptr, error);                                \
  } else {                                                            \
    pp::cpu::function(__VA_ARGS__);                                   \
  }
#else
#define PP_DISPATCH(tensor, function, ...)                               \
  PD_CHECK((tensor).is_cpu(), "this build serves CPU tensors only"); \
  pp::cpu::function(__VA_ARGS__)
#endif

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
    PD_CHECK(step.block % pp::kBlocksPerRow == 0, "a tensor's noise starts at a multiple of 16 blocks");
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
  for (const Tensor& t : tensors) PD_CHECK(t.place() == tensors[0].place(), "all tensors must be on one device");
  if (count == 0) return;
  PP_DISPATCH(tensors[0], noise_step, steps, rule, key_of(key), draws, isa);
}

pp::Rows rows_of(const Tensor& x) {
  pp::Rows rows;
  rows.data = x.data();
  rows.rows = x.shape().empty() ? 1 : x.shape()[0];
  rows.columns = rows.rows == 0 ? 0 : x.numel() / rows.rows;
  switch (x.dtype()) {
    case paddle::DataType::FLOAT32:
      rows.type = pp::Element::kFloat32;
      break;
    case paddle::DataType::FLOAT64:
      rows.type = pp::Element::kFloat64;
      break;
    case paddle::DataType::FLOAT16:
      rows.type = pp::Element::kFloat16;
      break;
    case paddle::DataType::BFLOAT16:
      rows.type = pp::Element::kBfloat16;
      break;
    default:
      PD_THROW("expected float16, bfloat16, float32 or float64");
  }
  return rows;
}

double* doubles_of(Tensor& x, int64_t size) {
  PD_CHECK(x.dtype() == paddle::DataType::FLOAT64 && x.numel() == size, "expected float64 of another size");
  return x.data<double>();
}

const double* doubles_of(const Tensor& x, int64_t size) {
  PD_CHECK(x.dtype() == paddle::DataType::FLOAT64 && x.numel() == size, "expected float64 of another size");
  return x.data<double>();
}

void* sum_of(Tensor& sum, const pp::Rows& x) {
  const bool wide = x.type == pp::Element::kFloat64;
  PD_CHECK(sum.numel() == x.columns && sum.dtype() == (wide ? paddle::DataType::FLOAT64 : paddle::DataType::FLOAT32),
           "expected a sum of the row's size in float32 (float64 for float64)");
  return sum.data();
}

void row_squared_norms(const Tensor& x, Tensor& squared) {
  const pp::Rows rows = rows_of(x);
  double* out = doubles_of(squared, rows.rows);
  PP_DISPATCH(x, row_squared_norms, rows, out);
}

void weighted_row_sum(const Tensor& x, const Tensor& c, Tensor& total) {
  const pp::Rows rows = rows_of(x);
  const double* weights = doubles_of(c, rows.rows);
  void* out = sum_of(total, rows);
  PP_DISPATCH(x, weighted_row_sum, rows, weights, out);
}

// `results`: squared norms, factors, then a sum for each gradient.
void clip_and_sum(const std::vector<Tensor>& gradients, std::vector<Tensor>& results,
                  const std::vector<float>& clip_norms, bool flat) {
  PD_CHECK(!gradients.empty() && results.size() == gradients.size() + 2, "expected one sum a gradient");
  PD_CHECK(clip_norms.size() == (flat ? 1 : gradients.size()), "expected one clip norm, or one a gradient");
  std::vector<pp::Rows> rows;
  std::vector<void*> sums;
  for (size_t i = 0; i < gradients.size(); ++i) {
    rows.push_back(rows_of(gradients[i]));
    PD_CHECK(rows[i].rows == rows[0].rows && gradients[i].place() == gradients[0].place(),
             "all gradients must have the same samples on the same device");
    sums.push_back(sum_of(results[i + 2], rows[i]));
  }
  const int64_t size = rows[0].rows * (flat ? 1 : static_cast<int64_t>(gradients.size()));
  const std::vector<double> bounds(clip_norms.begin(), clip_norms.end());
  double* squared = doubles_of(results[0], size);
  double* factors = doubles_of(results[1], size);
  PP_DISPATCH(gradients[0], clip_and_sum, rows, sums, bounds, flat, squared, factors);
}

const float* floats_of(const Tensor& x) {
  PD_CHECK(x.dtype() == paddle::DataType::FLOAT32, "expected float32");
  return x.data<float>();
}

void ghost_squared_norm(const Tensor& a, const Tensor& g, Tensor& squared, int isa) {
  const auto shape = a.shape(), other = g.shape();
  PD_CHECK(shape.size() == 3 && other.size() == 3 && shape[0] == other[0] && shape[1] == other[1],
           "expected [B, T, d] and [B, T, p]");
  double* out = doubles_of(squared, shape[0]);
  PP_DISPATCH(a, ghost_squared_norm, floats_of(a), floats_of(g), shape[0], shape[1], shape[2], other[2], out, isa);
}

const int64_t* ids_of(const Tensor& ids, const Tensor& g) {
  const auto shape = g.shape();
  PD_CHECK(shape.size() == 3 && ids.dtype() == paddle::DataType::INT64 && ids.numel() == shape[0] * shape[1],
           "expected int64 [B, T] and [B, T, D]");
  return ids.data<int64_t>();
}

void embedding_squared_norm(const Tensor& ids, const Tensor& g, Tensor& squared) {
  const int64_t* index = ids_of(ids, g);
  const auto shape = g.shape();
  double* out = doubles_of(squared, shape[0]);
  PP_DISPATCH(g, embedding_squared_norm, index, floats_of(g), shape[0], shape[1], shape[2], out);
}

void embedding_weighted_sum(const Tensor& ids, const Tensor& g, const Tensor& c, Tensor& table) {
  const int64_t* index = ids_of(ids, g);
  const auto shape = g.shape();
  const double* weights = doubles_of(c, shape[0]);
  PD_CHECK(table.dtype() == paddle::DataType::FLOAT32 && table.shape().size() == 2 && table.shape()[1] == shape[2],
           "expected a float32 table [V, D]");
  float* out = table.data<float>();
  PP_DISPATCH(g, embedding_weighted_sum, index, floats_of(g), weights, shape[0], shape[1], shape[2], out);
}

// `sums`: of the weight, and of the bias if there is one.
void norm_layer_sums(const Tensor& x, const Tensor& g, std::vector<Tensor>& sums, float epsilon, bool centered) {
  const auto shape = x.shape();
  PD_CHECK(shape.size() == 3 && x.numel() == g.numel() && (sums.size() == 1 || sums.size() == 2),
           "expected two tensors [B, T, D] and one or two sums");
  for (const Tensor& sum : sums) {
    PD_CHECK(sum.dtype() == paddle::DataType::FLOAT32 && sum.numel() == shape[0] * shape[2], "expected sums [B, D]");
  }
  float* bias = sums.size() == 2 ? sums[1].data<float>() : nullptr;
  PP_DISPATCH(x, norm_layer_sums, floats_of(x), floats_of(g), shape[0], shape[1], shape[2], epsilon, centered,
              sums[0].data<float>(), bias);
}

}  // namespace

PD_BUILD_OP(paddle_privacy_noise_step)
    .Inputs({paddle::Vec("Tensors"), "Key", "Spec"})
    .Outputs({paddle::Vec("TensorsOut")})
    .Attrs({"blocks: std::vector<int64_t>", "rule: int", "draws: int", "isa: int"})
    .SetInplaceMap({{paddle::Vec("Tensors"), paddle::Vec("TensorsOut")}})
    .SetKernelFn(PD_KERNEL(noise_step));

PD_BUILD_OP(paddle_privacy_row_squared_norms)
    .Inputs({"X", "Squared"})
    .Outputs({"SquaredOut"})
    .SetInplaceMap({{"Squared", "SquaredOut"}})
    .SetKernelFn(PD_KERNEL(row_squared_norms));

PD_BUILD_OP(paddle_privacy_weighted_row_sum)
    .Inputs({"X", "C", "Total"})
    .Outputs({"TotalOut"})
    .SetInplaceMap({{"Total", "TotalOut"}})
    .SetKernelFn(PD_KERNEL(weighted_row_sum));

PD_BUILD_OP(paddle_privacy_clip_and_sum)
    .Inputs({paddle::Vec("Gradients"), paddle::Vec("Results")})
    .Outputs({paddle::Vec("ResultsOut")})
    .Attrs({"clip_norms: std::vector<float>", "flat: bool"})
    .SetInplaceMap({{paddle::Vec("Results"), paddle::Vec("ResultsOut")}})
    .SetKernelFn(PD_KERNEL(clip_and_sum));

PD_BUILD_OP(paddle_privacy_ghost_squared_norm)
    .Inputs({"A", "G", "Squared"})
    .Outputs({"SquaredOut"})
    .Attrs({"isa: int"})
    .SetInplaceMap({{"Squared", "SquaredOut"}})
    .SetKernelFn(PD_KERNEL(ghost_squared_norm));

PD_BUILD_OP(paddle_privacy_embedding_squared_norm)
    .Inputs({"Ids", "G", "Squared"})
    .Outputs({"SquaredOut"})
    .SetInplaceMap({{"Squared", "SquaredOut"}})
    .SetKernelFn(PD_KERNEL(embedding_squared_norm));

PD_BUILD_OP(paddle_privacy_embedding_weighted_sum)
    .Inputs({"Ids", "G", "C", "Table"})
    .Outputs({"TableOut"})
    .SetInplaceMap({{"Table", "TableOut"}})
    .SetKernelFn(PD_KERNEL(embedding_weighted_sum));

PD_BUILD_OP(paddle_privacy_norm_layer_sums)
    .Inputs({"X", "G", paddle::Vec("Sums")})
    .Outputs({paddle::Vec("SumsOut")})
    .Attrs({"epsilon: float", "centered: bool"})
    .SetInplaceMap({{paddle::Vec("Sums"), paddle::Vec("SumsOut")}})
    .SetKernelFn(PD_KERNEL(norm_layer_sums));
