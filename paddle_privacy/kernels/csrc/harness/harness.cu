// Tests and times the CUDA kernels without Paddle: against float64 on the host, and against a device-to-device copy.
//
//   make -C paddle_privacy/kernels/csrc/harness run        (one command, well under two minutes)
//
// Exit status: 0 all right, 1 a result is wrong, 3 no usable GPU (the message says what CUDA said).
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../cuda_kernels.h"
#include "../kernels.h"

using namespace paddle_privacy;

namespace {

int failures = 0;

void check(const char* error) {
  if (error == nullptr) return;
  std::printf("CUDA error: %s\n", error);
  std::exit(1);
}

void check(cudaError_t status) {
  if (status != cudaSuccess) check(cudaGetErrorString(status));
}

void report(const std::string& name, double error, double allowed) {
  const bool good = error <= allowed;
  failures += !good;
  std::printf("%-58s %-4s error %.2e, allowed %.0e\n", name.c_str(), good ? "ok" : "BAD", error, allowed);
}

template <typename T>
class Device {
 public:
  explicit Device(size_t size) : size_(size) { check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes())); }
  explicit Device(const std::vector<T>& host) : Device(host.size()) { put(host); }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  void put(const std::vector<T>& host) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    std::vector<T> host(size_);
    check(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  T* data() const { return data_; }
  size_t bytes() const { return std::max<size_t>(1, size_) * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t size_;
};

std::mt19937_64 engine(7);

std::vector<float> normals(size_t size, float scale = 1.0f) {
  std::normal_distribution<float> draw(0.0f, scale);
  std::vector<float> values(size);
  for (float& value : values) value = draw(engine);
  return values;
}

template <typename T>
double distance(const std::vector<T>& actual, const std::vector<double>& expected) {
  double error = 0, scale = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error = std::max(error, std::fabs(static_cast<double>(actual[i]) - expected[i]));
    scale = std::max(scale, std::fabs(expected[i]));
  }
  return scale > 0 ? error / scale : error;
}

Key test_key() {
  Key key;
  for (int i = 0; i < 8; ++i) key.words[i] = 0x9E3779B9u * static_cast<uint32_t>(i + 1);
  return key;
}

// The CPU kernels, tested against the reference elsewhere, are the measure of bits here.
void test_noise() {
  const Key key = test_key();
  for (int draws : {1, 4}) {
    for (double grid : {0.0, 1.0 / 1024}) {
      for (size_t size : {1u, 255u, 70001u}) {
        std::vector<float> host = normals(size);
        std::vector<double> wide(host.begin(), host.end());
        Device<float> device(host);
        Device<double> device64(wide);
        std::vector<StepTensor> steps(2), cpu_steps;
        steps[0].sum = device.data();
        steps[1].sum64 = device64.data();
        for (StepTensor& step : steps) {
          step.size = static_cast<int64_t>(size);
          step.std = 1.25;
          step.grid = grid;
        }
        steps[0].block = 0xFFFFFFF0ull;
        steps[1].block = 1ull << 40;
        cpu_steps = steps;
        cpu_steps[0].sum = host.data();
        cpu_steps[1].sum64 = wide.data();
        check(cuda::noise_step(steps, Rule::kAddNoise, key, draws, -1, nullptr));
        cpu::noise_step(cpu_steps, Rule::kAddNoise, key, draws, -1);
        int64_t different = 0;
        const auto got = device.get();
        const auto got64 = device64.get();
        for (size_t i = 0; i < size; ++i) different += got[i] != host[i] || got64[i] != wide[i];
        report("noise bits, size " + std::to_string(size) + ", draws " + std::to_string(draws) +
                   (grid > 0 ? ", grid" : ""),
               static_cast<double>(different), 0);
      }
    }
  }
}

void test_updates() {
  const Key key = test_key();
  const size_t size = 10001;
  for (Rule rule : {Rule::kSgd, Rule::kMomentum, Rule::kNesterov, Rule::kAdam}) {
    std::vector<std::vector<float>> host;
    for (int i = 0; i < 4; ++i) host.push_back(normals(size));
    for (float& value : host[3]) value = std::fabs(value);
    std::vector<uint16_t> low(size);
    std::vector<std::vector<float>> before = host;
    Device<float> sum(host[0]), param(host[1]), m(host[2]), v(host[3]);
    Device<uint16_t> narrow(low);
    StepTensor step;
    step.size = size;
    step.std = 0.5, step.divisor = 8, step.learning_rate = 0.1f, step.l2 = 0.01f, step.decay = 0.99f;
    step.beta1 = 0.9f, step.beta2 = 0.99f, step.epsilon = 1e-6f, step.low_is_bfloat16 = rule != Rule::kSgd;
    StepTensor cpu_step = step;
    step.sum = sum.data(), step.param = param.data(), step.moment1 = m.data(), step.moment2 = v.data();
    step.low = narrow.data();
    cpu_step.sum = host[0].data(), cpu_step.param = host[1].data(), cpu_step.moment1 = host[2].data();
    cpu_step.moment2 = host[3].data(), cpu_step.low = low.data();
    check(cuda::noise_step({step}, rule, key, 1, -1, nullptr));
    cpu::noise_step({cpu_step}, rule, key, 1, -1);
    double worst = 0;
    const std::vector<std::vector<float>> got = {sum.get(), param.get(), m.get(), v.get()};
    for (int i = 0; i < 4; ++i) {
      worst = std::max(worst, distance(got[i], std::vector<double>(host[i].begin(), host[i].end())));
    }
    report("update rule " + std::to_string(static_cast<int>(rule)), worst, 1e-6);
    int64_t far = 0;
    const auto got_low = narrow.get();
    for (size_t i = 0; i < size; ++i) far += std::abs(static_cast<int>(got_low[i]) - static_cast<int>(low[i])) > 1;
    report("  its narrow copy", static_cast<double>(far), 0);
  }
}

void test_rows(bool small) {
  for (const auto& shape : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {5, 1000}, {3, 100003}, {1, 10000000}}) {
    const int64_t rows = shape.first, columns = shape.second;
    if (small && columns > 1000000) continue;
    std::vector<float> host = normals(rows * columns);
    if (rows == 3) host[columns + 5] = NAN;
    Device<float> x(host);
    Device<double> squared(rows), factors(rows);
    Device<float> total(columns);
    std::vector<double> norms(rows, 0), c(rows), sum(columns, 0);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < columns; ++k) norms[i] += static_cast<double>(host[i * columns + k]) * host[i * columns + k];
    }
    const Rows view{x.data(), Element::kFloat32, rows, columns};
    check(cuda::row_squared_norms(view, squared.data(), nullptr));
    auto got = squared.get();
    double worst = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (std::isfinite(norms[i])) worst = std::max(worst, std::fabs(got[i] / norms[i] - 1));
      else if (std::isfinite(got[i])) worst = INFINITY;
    }
    report("row norms " + std::to_string(rows) + " x " + std::to_string(columns), worst, 1e-7);
    check(cuda::clip_and_sum({view}, {total.data()}, {10.0}, true, squared.data(), factors.data(), nullptr));
    for (int64_t i = 0; i < rows; ++i) {
      c[i] = !std::isfinite(norms[i]) ? 0 : std::min(1.0, 10.0 / std::sqrt(norms[i]));
      for (int64_t k = 0; k < columns && c[i] != 0; ++k) sum[k] += c[i] * host[i * columns + k];
    }
    report("  clipped sum", distance(total.get(), sum), 1e-6);
    report("  factors", distance(factors.get(), c), 1e-6);
  }
  // float16 with a known answer, bfloat16 likewise: 3.0 is 0x4200 and 0x4040.
  for (bool half : {true, false}) {
    Device<uint16_t> x(std::vector<uint16_t>(4096, half ? 0x4200 : 0x4040));
    Device<double> squared(2);
    check(cuda::row_squared_norms({x.data(), half ? Element::kFloat16 : Element::kBfloat16, 2, 2048}, squared.data(),
                                  nullptr));
    report(half ? "float16 norms" : "bfloat16 norms", distance(squared.get(), {2048 * 9.0, 2048 * 9.0}), 0);
  }
}

void test_layers() {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1, 1, 1, 1}, {3, 70, 33, 65}, {2, 128, 384, 96}}) {
    const int64_t batch = shape[0], steps = shape[1], d = shape[2], p = shape[3];
    const auto a = normals(batch * steps * d), g = normals(batch * steps * p);
    std::vector<double> expected(batch, 0);
    for (int64_t i = 0; i < batch; ++i) {
      for (int64_t j = 0; j < d; ++j) {
        for (int64_t k = 0; k < p; ++k) {
          double sum = 0;
          for (int64_t t = 0; t < steps; ++t) {
            sum += static_cast<double>(a[(i * steps + t) * d + j]) * g[(i * steps + t) * p + k];
          }
          expected[i] += sum * sum;
        }
      }
    }
    Device<float> da(a), dg(g);
    Device<double> squared(batch);
    check(cuda::ghost_squared_norm(da.data(), dg.data(), batch, steps, d, p, squared.data(), -1, nullptr));
    report("ghost norm, T = " + std::to_string(steps), distance(squared.get(), expected), 2e-6);
  }

  const int64_t batch = 4, steps = 50, width = 70, vocabulary = 20;
  std::vector<int64_t> ids(batch * steps);
  for (auto& id : ids) id = static_cast<int64_t>(engine() % vocabulary);
  auto g = normals(batch * steps * width);
  g[steps * width + 3] = INFINITY;
  const std::vector<double> c = {1, 0, 0.5, 2};
  std::vector<double> norms(batch, 0), table(vocabulary * width, 0);
  for (int64_t i = 0; i < batch; ++i) {
    std::vector<double> own(vocabulary * width, 0);
    for (int64_t t = 0; t < steps; ++t) {
      for (int64_t k = 0; k < width; ++k) own[ids[i * steps + t] * width + k] += g[(i * steps + t) * width + k];
    }
    for (size_t k = 0; k < own.size(); ++k) {
      norms[i] += own[k] * own[k];
      if (c[i] != 0) table[k] += c[i] * own[k];
    }
  }
  Device<int64_t> dids(ids);
  Device<float> dg(g), dtable(std::vector<float>(vocabulary * width, 0.0f));
  Device<double> squared(batch), dc(c);
  check(cuda::embedding_squared_norm(dids.data(), dg.data(), batch, steps, width, squared.data(), nullptr));
  auto got = squared.get();
  report("embedding norm of a broken sample is not finite", std::isfinite(got[1]), 0);
  got[1] = norms[1] = 0;
  report("embedding norms", distance(got, norms), 2e-6);
  check(cuda::embedding_weighted_sum(dids.data(), dg.data(), dc.data(), batch, steps, width, dtable.data(), nullptr));
  report("embedding sums", distance(dtable.get(), table), 2e-6);

  for (bool centered : {true, false}) {
    const auto x = normals(batch * steps * width, 3.0f), y = normals(batch * steps * width);
    std::vector<double> weight(batch * width, 0), bias(batch * width, 0);
    for (int64_t row = 0; row < batch * steps; ++row) {
      double mean = 0, variance = 0;
      for (int64_t k = 0; k < width && centered; ++k) mean += x[row * width + k] / static_cast<double>(width);
      for (int64_t k = 0; k < width; ++k) variance += std::pow(x[row * width + k] - mean, 2) / width;
      for (int64_t k = 0; k < width; ++k) {
        weight[row / steps * width + k] += (x[row * width + k] - mean) / std::sqrt(variance + 1e-5) * y[row * width + k];
        bias[row / steps * width + k] += y[row * width + k];
      }
    }
    Device<float> dx(x), dy(y), dweight(batch * width), dbias(batch * width);
    check(cuda::norm_layer_sums(dx.data(), dy.data(), batch, steps, width, 1e-5f, centered, dweight.data(),
                                dbias.data(), nullptr));
    report(centered ? "layer norm weight" : "RMS norm weight", distance(dweight.get(), weight), 5e-6);
    report("  bias", distance(dbias.get(), bias), 5e-6);
  }
}

// Milliseconds of one call, the best of some.
double milliseconds(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  float best = 1e30f;
  for (int i = 0; i < 10; ++i) {
    check(cudaEventRecord(begin));
    call();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float time = 0;
    check(cudaEventElapsedTime(&time, begin, end));
    if (i > 1) best = std::min(best, time);
  }
  return best;
}

[[maybe_unused]] void times() {
  const size_t size = 64u << 20;
  Device<float> x(size), y(size);
  check(cudaMemset(x.data(), 0, x.bytes()));
  check(cudaMemset(y.data(), 0, y.bytes()));
  const double copy = milliseconds([&] { check(cudaMemcpyAsync(y.data(), x.data(), x.bytes(), cudaMemcpyDeviceToDevice)); });
  const double bandwidth = 2.0 * static_cast<double>(x.bytes()) / copy / 1e6;
  std::printf("\n%-44s %9.3f ms %8.0f GB/s\n", "device-to-device copy", copy, bandwidth);
  const auto line = [&](const char* name, double time, double bytes) {
    std::printf("%-44s %9.3f ms %8.0f GB/s %5.0f%% of the copy\n", name, time, bytes / time / 1e6,
                100 * bytes / time / 1e6 / bandwidth);
  };
  StepTensor step;
  step.sum = x.data(), step.param = y.data(), step.size = size, step.std = 1, step.divisor = 64;
  step.learning_rate = 0.1f;
  const Key key = test_key();
  const double bytes = static_cast<double>(x.bytes());
  line("add noise", milliseconds([&] { check(cuda::noise_step({step}, Rule::kAddNoise, key, 1, -1, nullptr)); }), 2 * bytes);
  line("noise and SGD", milliseconds([&] { check(cuda::noise_step({step}, Rule::kSgd, key, 1, -1, nullptr)); }), 3 * bytes);
  const int64_t rows = 64, columns = 1 << 20;
  Device<float> total(columns);
  Device<double> squared(rows), factors(rows);
  const Rows view{x.data(), Element::kFloat32, rows, columns};
  line("clip and sum, 64 x 2^20, two readings", milliseconds([&] {
         check(cuda::clip_and_sum({view}, {total.data()}, {1.0}, true, squared.data(), factors.data(), nullptr));
       }),
       2 * bytes);
  line("row norms, 64 x 2^20", milliseconds([&] { check(cuda::row_squared_norms(view, squared.data(), nullptr)); }), bytes);
  const int64_t batch = 64, steps = 128, d = 768, p = 3072;
  const double time = milliseconds(
      [&] { check(cuda::ghost_squared_norm(x.data(), y.data(), batch, steps, d, p, squared.data(), -1, nullptr)); });
  std::printf("%-44s %9.3f ms %8.1f TFLOP/s of the two full Gram matrices\n", "ghost norm, B=64 T=128 d=768 p=3072", time,
              2.0 * batch * steps * steps * (d + p) / time / 1e9);
}

}  // namespace

extern "C" {

// For ctypes: what CUDA says about the devices here; an empty string if there is one.
__attribute__((visibility("default"))) const char* paddle_privacy_cuda_problem() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count > 0 ? "" : "no CUDA device";
}

__attribute__((visibility("default"))) int paddle_privacy_cuda_self_test(int small) {
  failures = 0;
  test_noise();
  test_updates();
  test_rows(small != 0);
  test_layers();
  return failures;
}
}

#if !defined(PP_HARNESS_LIBRARY)
// --small leaves out the large sizes and the times.
int main(int count, char** arguments) {
  const bool small = count > 1 && std::string(arguments[1]) == "--small";
  const std::string problem = paddle_privacy_cuda_problem();
  if (!problem.empty()) {
    std::printf("no usable GPU: %s\n", problem.c_str());
    return 3;
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, compute capability %d.%d\n\n", properties.name, properties.major, properties.minor);
  const int wrong = paddle_privacy_cuda_self_test(small);
  if (!small) times();
  std::printf("\n%s\n", wrong == 0 ? "all results right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}
#endif
