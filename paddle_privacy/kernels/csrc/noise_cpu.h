// Rows of 256 normals on the CPU, in whichever vector width the processor has. See stream.h for the definition.
#pragma once

#include "simd.h"
#include "stream.h"

namespace paddle_privacy {

// LANES consecutive blocks of a row, word-sliced: lane l of vector w is word w of block l.
template <int LANES>
struct Lanes {
  using U = typename VectorTypes<LANES>::U;
  using I = typename VectorTypes<LANES>::I;
  using Bytes = typename VectorTypes<LANES>::Bytes;
  using F = typename VectorTypes<LANES>::F;

  template <int BITS>
  static PP_INLINE void rotate(U& x) {
#if PP_X86 && !defined(__clang__)
    // Rotations by whole bytes are one AVX2 shuffle; AVX-512 has a rotate instruction and SSE2 no byte shuffle.
    if (LANES == 8 && (BITS == 16 || BITS == 8)) {
      Bytes order;
      for (int i = 0; i < LANES * 4; ++i) order[i] = static_cast<uint8_t>((i & ~3) | ((i - BITS / 8) & 3));
      x = reinterpret_cast<U>(__builtin_shuffle(reinterpret_cast<Bytes>(x), order));
      return;
    }
#endif
    x = (x << BITS) | (x >> (32 - BITS));
  }

  static PP_INLINE void quarter(U& a, U& b, U& c, U& d) {
    a += b, d ^= a, rotate<16>(d);
    c += d, b ^= c, rotate<12>(b);
    a += b, d ^= a, rotate<8>(d);
    c += d, b ^= c, rotate<7>(b);
  }

  // Natural logarithm of u in (0, 1), given as u where that is below 1/2, else as u - 1.
  static PP_INLINE F log_unit(F given) {
    const F one = F{} + 1.0f;
    const I bits = reinterpret_cast<I>(given + (given < 0.0f ? one : F{}));
    const I exponent = (bits - 0x3F3504F3) >> 23;
    const F reduced = reinterpret_cast<F>(bits - (exponent << 23)) - 1.0f;
    const F f = exponent == 0 ? given : reduced;
    const F e = __builtin_convertvector(exponent, F);
    const F z = f * f;
    F y = 7.0376836292e-2f * f;
    y += -1.1514610310e-1f, y *= f;
    y += 1.1676998740e-1f, y *= f;
    y += -1.2420140846e-1f, y *= f;
    y += 1.4249322787e-1f, y *= f;
    y += -1.6668057665e-1f, y *= f;
    y += 2.0000714765e-1f, y *= f;
    y += -2.4999993993e-1f, y *= f;
    y += 3.3333331174e-1f, y *= f;
    y *= z;
    y += e * -2.12194440e-4f;
    y += -0.5f * z;
    y += f;
    return y + e * 0.693359375f;
  }

  static PP_INLINE void box_muller(U radius_word, U angle_word, float* first, float* second) {
    const F coarse = __builtin_convertvector(reinterpret_cast<I>(radius_word), F) * kTwoToMinus32;
    const F low = __builtin_convertvector(reinterpret_cast<I>(angle_word & 0xFFu), F);
    const F fine = (low + 0.5f) * kTwoToMinus40;
    F squared = -2.0f * log_unit(coarse + fine);
    F radius;
    for (int i = 0; i < LANES; ++i) radius[i] = __builtin_sqrtf(squared[i]);

    // Bits 30 and 31 are the quadrant, bits 8 to 29 the arc.
    const I odd = reinterpret_cast<I>((angle_word >> 7) & 0x7FFFFEu) - 0x3FFFFF;
    const F x = __builtin_convertvector(odd, F) * kArc;
    const F z = x * x;
    F s = -1.9515295891e-4f * z + 8.3321608736e-3f;
    s = s * z + -1.6666654611e-1f;
    s = s * z * x + x;
    F c = 2.443315711809948e-5f * z + -1.388731625493765e-3f;
    c = c * z + 4.166664568298827e-2f;
    c = c * z * z + -0.5f * z + 1.0f;

    const U swap = reinterpret_cast<U>(reinterpret_cast<I>(angle_word << 1) >> 31);
    const U exchange = (reinterpret_cast<U>(c) ^ reinterpret_cast<U>(s)) & swap;
    const F one = reinterpret_cast<F>(reinterpret_cast<U>(c) ^ exchange);
    const F two = reinterpret_cast<F>(reinterpret_cast<U>(s) ^ exchange);
    const U flip_one = (angle_word ^ (angle_word << 1)) & 0x80000000u;
    const U flip_two = angle_word & 0x80000000u;
    const U a = reinterpret_cast<U>(radius * one) ^ flip_one;
    const U b = reinterpret_cast<U>(radius * two) ^ flip_two;
    std::memcpy(first, &a, sizeof a);
    std::memcpy(second, &b, sizeof b);
  }

  // One row of normals; `block`, a multiple of 16, is its first block.
  static PP_INLINE void row(const Key& key, uint64_t block, uint64_t nonce, float* out) {
    for (int lane = 0; lane < kBlocksPerRow; lane += LANES) {
      U initial[16], v[16];
      const uint32_t constants[4] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
      for (int i = 0; i < 4; ++i) initial[i] = U{} + constants[i];
      for (int i = 0; i < 8; ++i) initial[4 + i] = U{} + key.words[i];
      // `block` is a multiple of 16, so that no carry arises within a row.
      U places;
      for (int i = 0; i < LANES; ++i) places[i] = static_cast<uint32_t>(i);
      initial[12] = places + (static_cast<uint32_t>(block) + static_cast<uint32_t>(lane));
      initial[13] = U{} + static_cast<uint32_t>(block >> 32);
      initial[14] = U{} + static_cast<uint32_t>(nonce);
      initial[15] = U{} + static_cast<uint32_t>(nonce >> 32);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) v[i] = initial[i];
      for (int i = 0; i < 10; ++i) {
        quarter(v[0], v[4], v[8], v[12]);
        quarter(v[1], v[5], v[9], v[13]);
        quarter(v[2], v[6], v[10], v[14]);
        quarter(v[3], v[7], v[11], v[15]);
        quarter(v[0], v[5], v[10], v[15]);
        quarter(v[1], v[6], v[11], v[12]);
        quarter(v[2], v[7], v[8], v[13]);
        quarter(v[3], v[4], v[9], v[14]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) v[i] += initial[i];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        box_muller(v[i], v[i + 8], out + i * kBlocksPerRow + lane, out + (i + 8) * kBlocksPerRow + lane);
      }
    }
  }
};

#if PP_X86
__attribute__((target("arch=x86-64-v4"))) inline void normal_row_avx512(const Key& key, uint64_t block, uint64_t nonce,
                                                                        float* out) {
  Lanes<16>::row(key, block, nonce, out);
}
__attribute__((target("arch=x86-64-v3"))) inline void normal_row_avx2(const Key& key, uint64_t block, uint64_t nonce,
                                                                      float* out) {
  Lanes<8>::row(key, block, nonce, out);
}
#endif
inline void normal_row_baseline(const Key& key, uint64_t block, uint64_t nonce, float* out) {
  Lanes<4>::row(key, block, nonce, out);
}

using NormalRow = void (*)(const Key&, uint64_t, uint64_t, float*);

inline NormalRow normal_row_for(Isa isa) {
#if PP_X86
  if (isa == Isa::kAvx512) return normal_row_avx512;
  if (isa == Isa::kAvx2) return normal_row_avx2;
#endif
  return normal_row_baseline;
}

}  // namespace paddle_privacy
