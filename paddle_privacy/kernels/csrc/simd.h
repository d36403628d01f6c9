// Vector instruction sets: which ones there are, and functions compiled once for each.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PP_X86 1
#else
#define PP_X86 0
#endif

#define PP_INLINE inline __attribute__((always_inline))

// The address sanitizer starts after the resolvers that target_clones needs, hence PP_NO_CLONES.
#if PP_X86 && !defined(__clang__) && !defined(PP_NO_CLONES)
#define PP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PP_CLONES
#endif

namespace paddle_privacy {

// Narrowest first.
enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// GCC drops vector_size when it depends on a template parameter, so the widths are spelled out.
template <int LANES>
struct VectorTypes;
#define PP_VECTOR_TYPES(LANES)                                   \
  template <>                                                    \
  struct VectorTypes<LANES> {                                    \
    typedef uint32_t U __attribute__((vector_size(LANES * 4)));  \
    typedef int32_t I __attribute__((vector_size(LANES * 4)));   \
    typedef uint8_t Bytes __attribute__((vector_size(LANES * 4))); \
    typedef float F __attribute__((vector_size(LANES * 4)));     \
    typedef double D __attribute__((vector_size(LANES * 8)));    \
  };
PP_VECTOR_TYPES(4)
PP_VECTOR_TYPES(8)
PP_VECTOR_TYPES(16)
#undef PP_VECTOR_TYPES

inline Isa best_isa() {
#if PP_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kBaseline;
}

}  // namespace paddle_privacy
