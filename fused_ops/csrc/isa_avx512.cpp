// AVX-512 with VNNI: sixteen floats, thirty-two registers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,prefer-vector-width=512")
#define GLM5Q_AVX512 1
#define LANES 16
#define REGISTERS 32
#define ENTRY(name) glm5q_##name##_avx512
#include "all_ops.h"
#endif
