// The noise stream, one element at a time: ChaCha20 words and their Box-Muller transform.
// paddle_privacy/kernels/stream.py is the definition; everything here reproduces it bit for bit, which is why every
// float operation rounds once: the host compiles with -ffp-contract=off, the device uses the _rn intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PP_HD __host__ __device__ __forceinline__
#define PP_UNROLL _Pragma("unroll")
#else
#define PP_HD inline
#define PP_UNROLL
#endif

namespace paddle_privacy {

constexpr int kBlocksPerRow = 16;
constexpr int kNormalsPerRow = 256;
constexpr float kTwoToMinus32 = 2.3283064365386963e-10f;
constexpr float kTwoToMinus40 = 9.094947017729282e-13f;
// (pi / 2) / 2^23
constexpr float kArc = 0x1.921fb60000000p-23f;

struct Key {
  uint32_t words[8];
};

PP_HD float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

PP_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

PP_HD float square_root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

PP_HD int32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(x);
#else
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

PP_HD float float_of(int32_t bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

PP_HD uint32_t rotate_left(uint32_t x, int bits) { return (x << bits) | (x >> (32 - bits)); }

PP_HD void quarter_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  a += b, d = rotate_left(d ^ a, 16);
  c += d, b = rotate_left(b ^ c, 12);
  a += b, d = rotate_left(d ^ a, 8);
  c += d, b = rotate_left(b ^ c, 7);
}

PP_HD void chacha20_block(const Key& key, uint64_t counter, uint64_t nonce, uint32_t (&out)[16]) {
  const uint32_t initial[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u, key.words[0], key.words[1],
                                key.words[2], key.words[3], key.words[4], key.words[5], key.words[6], key.words[7],
                                static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                                static_cast<uint32_t>(nonce), static_cast<uint32_t>(nonce >> 32)};
  PP_UNROLL
  for (int i = 0; i < 16; ++i) out[i] = initial[i];
  PP_UNROLL
  for (int i = 0; i < 10; ++i) {
    quarter_round(out[0], out[4], out[8], out[12]);
    quarter_round(out[1], out[5], out[9], out[13]);
    quarter_round(out[2], out[6], out[10], out[14]);
    quarter_round(out[3], out[7], out[11], out[15]);
    quarter_round(out[0], out[5], out[10], out[15]);
    quarter_round(out[1], out[6], out[11], out[12]);
    quarter_round(out[2], out[7], out[8], out[13]);
    quarter_round(out[3], out[4], out[9], out[14]);
  }
  PP_UNROLL
  for (int i = 0; i < 16; ++i) out[i] += initial[i];
}

// Natural logarithm of u in (0, 1), given as u where that is below 1/2, else as u - 1.
PP_HD float log_unit(float given) {
  const int32_t bits = bits_of(given < 0 ? add(given, 1.0f) : given);
  const int32_t exponent = (bits - 0x3F3504F3) >> 23;
  const float f = exponent == 0 ? given : add(float_of(bits - exponent * (1 << 23)), -1.0f);
  const float e = static_cast<float>(exponent);
  const float z = mul(f, f);
  float y = mul(7.0376836292e-2f, f);
  y = add(y, -1.1514610310e-1f), y = mul(y, f);
  y = add(y, 1.1676998740e-1f), y = mul(y, f);
  y = add(y, -1.2420140846e-1f), y = mul(y, f);
  y = add(y, 1.4249322787e-1f), y = mul(y, f);
  y = add(y, -1.6668057665e-1f), y = mul(y, f);
  y = add(y, 2.0000714765e-1f), y = mul(y, f);
  y = add(y, -2.4999993993e-1f), y = mul(y, f);
  y = add(y, 3.3333331174e-1f), y = mul(y, f);
  y = mul(y, z);
  y = add(y, mul(e, -2.12194440e-4f));
  y = add(y, mul(-0.5f, z));
  y = add(y, f);
  return add(y, mul(e, 0.693359375f));
}

PP_HD void box_muller(uint32_t radius_word, uint32_t angle_word, float& first, float& second) {
  const float coarse = mul(static_cast<float>(static_cast<int32_t>(radius_word)), kTwoToMinus32);
  const float fine = mul(add(static_cast<float>(angle_word & 0xFFu), 0.5f), kTwoToMinus40);
  const float radius = square_root(mul(-2.0f, log_unit(add(coarse, fine))));

  const uint32_t angle = angle_word >> 8;
  const uint32_t quadrant = angle >> 22;
  const int32_t odd = static_cast<int32_t>((angle & 0x3FFFFFu) << 1) - 0x3FFFFF;
  const float x = mul(static_cast<float>(odd), kArc);
  const float z = mul(x, x);
  float s = add(mul(-1.9515295891e-4f, z), 8.3321608736e-3f);
  s = add(mul(s, z), -1.6666654611e-1f);
  s = add(mul(mul(s, z), x), x);
  float c = add(mul(2.443315711809948e-5f, z), -1.388731625493765e-3f);
  c = add(mul(c, z), 4.166664568298827e-2f);
  c = add(add(mul(mul(c, z), z), mul(-0.5f, z)), 1.0f);

  const bool swap = quadrant & 1u;
  first = mul(radius, swap ? s : c);
  second = mul(radius, swap ? c : s);
  first = float_of(bits_of(first) ^ static_cast<int32_t>(((quadrant ^ (quadrant >> 1)) & 1u) << 31));
  second = float_of(bits_of(second) ^ static_cast<int32_t>((quadrant >> 1) << 31));
}

// A float that sits on the grid: x rounded (to even) to a multiple of `grid`, a power of two; `inverse` = 1 / grid.
PP_HD float to_grid(float x, float grid, float inverse) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(rintf(__fmul_rn(x, inverse)), grid);
#else
  return __builtin_rintf(x * inverse) * grid;
#endif
}

PP_HD double to_grid(double x, double grid, double inverse) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(rint(__dmul_rn(x, inverse)), grid);
#else
  return __builtin_rint(x * inverse) * grid;
#endif
}

}  // namespace paddle_privacy
