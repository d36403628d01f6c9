// Norms and weighted sums over the rows of per-sample gradients, on the GPU.
#pragma once

#include "launch.cuh"

namespace paddle_privacy {
namespace cuda {

// Columns that one block turns into one partial sum of squares.
constexpr int64_t kPiece = 16384;

inline int64_t pieces_of(int64_t columns) { return (columns + kPiece - 1) / kPiece; }

// partial[row, piece]. Four squares are added in float, everything else in double: the error does not grow with the
// length, and cards with few double units keep up with their memory.
template <typename T>
__global__ void __launch_bounds__(kThreads) squares_kernel(const T* x, int64_t columns, int64_t pieces,
                                                           double* partial) {
  const int64_t row = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const T* data = x + row * columns;
  const int64_t end = min(columns, (piece + 1) * kPiece);
  double sum = 0;
  for (int64_t i = piece * kPiece + threadIdx.x; i < end; i += 4 * kThreads) {
    decltype(widen(T())) four = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t column = i + k * kThreads;
      if (column < end) {
        const auto value = widen(data[column]);
        four += value * value;
      }
    }
    sum += four;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// squared[row] (+)= sum of the row's pieces, in order.
__global__ void sum_pieces_kernel(const double* partial, int64_t rows, int64_t pieces, bool accumulate,
                                         double* squared) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  double sum = accumulate ? squared[row] : 0;
  for (int64_t piece = 0; piece < pieces; ++piece) sum += partial[row * pieces + piece];
  squared[row] = sum;
}

template <typename T, typename Sum>
__global__ void __launch_bounds__(kThreads) weighted_sum_kernel(const T* x, const double* c, int64_t rows,
                                                                int64_t columns, Sum* total) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= columns) return;
  Sum sum = 0;
#pragma unroll 4
  for (int64_t row = 0; row < rows; ++row) {
    const Sum weight = static_cast<Sum>(c[row]);
    // A row of weight 0 may hold NaN: it is not read.
    if (weight != 0) sum += weight * widen(x[row * columns + column]);
  }
  total[column] = sum;
}

__global__ void clip_factors_kernel(const double* squared, const double* bounds, int64_t rows, int64_t tensors,
                                           double* factors) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  bool finite = true;
  for (int64_t i = 0; i < tensors; ++i) finite = finite && isfinite(squared[i * rows + row]);
  for (int64_t i = 0; i < tensors; ++i) {
    const double norm = sqrt(squared[i * rows + row]);
    factors[i * rows + row] =
        !finite ? 0.0 : norm <= bounds[i] ? 1.0 : static_cast<double>(__double2float_rd(bounds[i] / norm));
  }
}

template <typename T>
const char* squares(const Rows& x, bool accumulate, double* squared, cudaStream_t stream) {
  const int64_t pieces = pieces_of(x.columns);
  Scratch<double> partial(x.rows * pieces, stream);
  PP_TRY(partial.status());
  if (pieces > 0) {
    squares_kernel<T><<<static_cast<unsigned>(x.rows * pieces), kThreads, 0, stream>>>(
        static_cast<const T*>(x.data), x.columns, pieces, partial.data());
  }
  sum_pieces_kernel<<<static_cast<unsigned>((x.rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      partial.data(), x.rows, pieces, accumulate, squared);
  return launched();
}

inline const char* squares_of(const Rows& x, bool accumulate, double* squared, cudaStream_t stream) {
  if (x.rows == 0) return nullptr;
  switch (x.type) {
    case Element::kFloat64:
      return squares<double>(x, accumulate, squared, stream);
    case Element::kFloat16:
      return squares<__half>(x, accumulate, squared, stream);
    case Element::kBfloat16:
      return squares<__nv_bfloat16>(x, accumulate, squared, stream);
    default:
      return squares<float>(x, accumulate, squared, stream);
  }
}

inline const char* weighted_sum_of(const Rows& x, const double* c, void* total, cudaStream_t stream) {
  if (x.columns == 0) return nullptr;
  const auto blocks = static_cast<unsigned>((x.columns + kThreads - 1) / kThreads);
  switch (x.type) {
    case Element::kFloat64:
      weighted_sum_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const double*>(x.data), c, x.rows, x.columns,
                                                           static_cast<double*>(total));
      break;
    case Element::kFloat16:
      weighted_sum_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const __half*>(x.data), c, x.rows, x.columns,
                                                           static_cast<float*>(total));
      break;
    case Element::kBfloat16:
      weighted_sum_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(x.data), c, x.rows,
                                                           x.columns, static_cast<float*>(total));
      break;
    default:
      weighted_sum_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const float*>(x.data), c, x.rows, x.columns,
                                                           static_cast<float*>(total));
  }
  return launched();
}

}  // namespace cuda
}  // namespace paddle_privacy
