// Squared Frobenius norm of a^T g per sample without forming it: sum of (a a^T) * (g g^T) over positions s <= t.
//
// Both Gram matrices are symmetric, so the tiles on and above the diagonal do; a tile of one is multiplied by the tile
// of the other while both are in registers, and neither matrix is ever written to memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace paddle_privacy {

// A tile is kRows x kColumns dot products, as many as a vector has lanes: vectors run along the depth, which is
// contiguous in memory, so nothing is packed; one transposing reduction then turns the tile's vectors into one.
template <int LANES>
struct GhostTile {
  static constexpr int kRows = LANES == 16 ? 4 : 2;
  static constexpr int kColumns = LANES / kRows;
  // A stripe of rows over a stretch of depth is 16 KiB: it stays in L1 while the columns pass by.
  static constexpr int64_t kStripe = 16;
  static constexpr int64_t kDepth = 384;
  using F = typename VectorTypes<LANES>::F;
  using I = typename VectorTypes<LANES>::I;
  using D = typename VectorTypes<LANES>::D;

  // Lane j of the result is the sum of the lanes of v[j]. One level adds neighbours SPAN lanes apart and interleaves
  // two vectors; a template, because the shuffles must be known to the compiler.
  template <int SPAN>
  static PP_INLINE F sums_of(F (&v)[LANES]) {
    if constexpr (SPAN < LANES) {
      I first, second;
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) {
        const int source = lane % (2 * SPAN) < SPAN ? lane : LANES + lane - SPAN;
        first[lane] = source;
        second[lane] = source + SPAN;
      }
#pragma GCC unroll 8
      for (int i = 0; i < LANES / (2 * SPAN); ++i) {
        v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], first) + __builtin_shuffle(v[2 * i], v[2 * i + 1], second);
      }
      return sums_of<2 * SPAN>(v);
    } else {
      return v[0];
    }
  }

  // Adds to `sums` the dot products over depths [begin, end) of rows s.. with rows t.. of x; positions beyond the last
  // are computed as copies of the last and never counted. The end of the last stretch, depth % LANES values a row,
  // comes from `ends`, padded with zeros.
  static PP_INLINE F dots(const float* x, const float* ends, int64_t steps, int64_t depth, int64_t begin, int64_t end,
                          int64_t s, int64_t t) {
    F sums[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) sums[i] = F{};
    const float *left[kRows], *right[kColumns];
    for (int i = 0; i < kRows; ++i) left[i] = x + std::min(s + i, steps - 1) * depth;
    for (int j = 0; j < kColumns; ++j) right[j] = x + std::min(t + j, steps - 1) * depth;
    const int64_t whole = std::min(end, depth / LANES * LANES);
    for (int64_t k = begin; k < whole; k += LANES) multiply(left, right, k, sums);
    if (whole < end) {
      for (int i = 0; i < kRows; ++i) left[i] = ends + std::min(s + i, steps - 1) * LANES;
      for (int j = 0; j < kColumns; ++j) right[j] = ends + std::min(t + j, steps - 1) * LANES;
      multiply(left, right, 0, sums);
    }
    return sums_of<1>(sums);
  }

  static PP_INLINE void multiply(const float* const (&left)[kRows], const float* const (&right)[kColumns], int64_t k,
                                 F (&sums)[LANES]) {
    F columns[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) std::memcpy(&columns[j], right[j] + k, sizeof(F));
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      F row;
      std::memcpy(&row, left[i] + k, sizeof(F));
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) sums[i * kColumns + j] += row * columns[j];
    }
  }

  static PP_INLINE void row_ends(const float* x, int64_t steps, int64_t depth, float* ends) {
    const int64_t left = depth % LANES;
    std::memset(ends, 0, sizeof(float) * steps * LANES);
    for (int64_t s = 0; s < steps; ++s) {
      std::memcpy(ends + s * LANES, x + (s + 1) * depth - left, sizeof(float) * left);
    }
  }

  // gram[row tile][column tile] = dot products of rows [first, last) with all rows from the diagonal on.
  static PP_INLINE void gram_rows(const float* x, const float* ends, int64_t steps, int64_t depth, int64_t first,
                                  int64_t last, int64_t tiles, F* gram) {
    const int64_t pieces = (depth + kDepth - 1) / kDepth;
    const int64_t piece = ((depth + pieces - 1) / pieces + LANES - 1) / LANES * LANES;
    for (int64_t begin = 0; begin < depth; begin += piece) {
      for (int64_t t = first / kColumns * kColumns; t < steps; t += kColumns) {
        for (int64_t s = first; s < std::min(last, t + kColumns); s += kRows) {
          F& out = gram[(s - first) / kRows * tiles + t / kColumns];
          const F sums = dots(x, ends, steps, depth, begin, std::min(depth, begin + piece), s, t);
          out = begin == 0 ? sums : out + sums;
        }
      }
    }
  }

  // Stripes part, part + parts, ... of one sample's Gram matrices, a stripe being kStripe rows.
  static PP_INLINE double sample(const float* a, const float* g, int64_t steps, int64_t d, int64_t p, int64_t part,
                                 int64_t parts, float* scratch) {
    float *a_ends = scratch, *g_ends = a_ends + steps * LANES;
    row_ends(a, steps, d, a_ends);
    row_ends(g, steps, p, g_ends);
    const int64_t tiles = (steps + kColumns - 1) / kColumns;
    F* a_gram = reinterpret_cast<F*>(g_ends + steps * LANES);
    F* g_gram = a_gram + kStripe / kRows * tiles;
    D total = D{};
    double diagonal = 0;
    for (int64_t first = part * kStripe; first < steps; first += parts * kStripe) {
      const int64_t last = std::min(steps, first + kStripe);
      gram_rows(a, a_ends, steps, d, first, last, tiles, a_gram);
      gram_rows(g, g_ends, steps, p, first, last, tiles, g_gram);
      for (int64_t s = first; s < last; s += kRows) {
        for (int64_t t = s / kColumns * kColumns; t < steps; t += kColumns) {
          const int64_t tile = (s - first) / kRows * tiles + t / kColumns;
          const F product = a_gram[tile] * g_gram[tile];
          if (s + kRows <= t && t + kColumns <= steps) {
            total += __builtin_convertvector(product, D);
            continue;
          }
          for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kColumns; ++j) {
              if (s + i > t + j || t + j >= steps) continue;
              diagonal += (s + i == t + j ? 1.0 : 2.0) * product[i * kColumns + j];
            }
          }
        }
      }
    }
    double sum = 0;
    for (int i = 0; i < LANES; ++i) sum += total[i];
    return 2 * sum + diagonal;
  }

  // Floats of scratch memory, 64-byte aligned.
  static int64_t scratch_size(int64_t steps) {
    return 2 * steps * LANES + 2 * (kStripe / kRows) * ((steps + kColumns - 1) / kColumns) * LANES;
  }
};

using GhostSample = double (*)(const float*, const float*, int64_t, int64_t, int64_t, int64_t, int64_t, float*);

#if PP_X86
__attribute__((target("arch=x86-64-v4"))) inline double ghost_avx512(const float* a, const float* g, int64_t steps,
                                                                     int64_t d, int64_t p, int64_t part, int64_t parts,
                                                                     float* scratch) {
  return GhostTile<16>::sample(a, g, steps, d, p, part, parts, scratch);
}
__attribute__((target("arch=x86-64-v3"))) inline double ghost_avx2(const float* a, const float* g, int64_t steps,
                                                                   int64_t d, int64_t p, int64_t part, int64_t parts,
                                                                   float* scratch) {
  return GhostTile<8>::sample(a, g, steps, d, p, part, parts, scratch);
}
#endif
inline double ghost_baseline(const float* a, const float* g, int64_t steps, int64_t d, int64_t p, int64_t part,
                             int64_t parts, float* scratch) {
  return GhostTile<4>::sample(a, g, steps, d, p, part, parts, scratch);
}

inline void ghost_norm_cpu(const float* a, const float* g, int64_t batch, int64_t steps, int64_t d, int64_t p,
                           double* squared, Isa isa) {
  GhostSample sample = ghost_baseline;
  int64_t scratch_size = GhostTile<4>::scratch_size(steps);
#if PP_X86
  if (isa == Isa::kAvx512) sample = ghost_avx512, scratch_size = GhostTile<16>::scratch_size(steps);
  if (isa == Isa::kAvx2) sample = ghost_avx2, scratch_size = GhostTile<8>::scratch_size(steps);
#endif
  // Fewer samples than threads: a sample is split by stripes of its Gram matrices.
  const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  const int64_t stripes = (steps + GhostTile<4>::kStripe - 1) / GhostTile<4>::kStripe;
  const int64_t parts = std::max<int64_t>(1, std::min(stripes, batch >= 2 * threads ? 1 : 2 * threads / batch));
  std::vector<double> partial(static_cast<size_t>(batch * parts));
  parallel_for(batch * parts, [&](int64_t task) {
    thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < scratch_size + 16) scratch.resize(scratch_size + 16);
    float* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) / sizeof(float);
    const int64_t i = task / parts;
    partial[task] = sample(a + i * steps * d, g + i * steps * p, steps, d, p, task % parts, parts, aligned);
  });
  for (int64_t i = 0; i < batch; ++i) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += partial[i * parts + part];
    // Rounding can leave a sum of signed terms just below zero; NaN stays NaN.
    squared[i] = sum < 0 ? 0 : sum;
  }
}

}  // namespace paddle_privacy
