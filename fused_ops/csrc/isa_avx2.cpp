// AVX2 + FMA: eight floats, sixteen registers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#define GLM5Q_AVX2 1
#define LANES 8
#define REGISTERS 16
#define ENTRY(name) glm5q_##name##_avx2
#include "all_ops.h"
#endif
