// AVX-512 with bfloat16 products, which only attention uses.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#define GLM5Q_BF16 1
#define LANES 16
#define REGISTERS 32
#define ENTRY(name) glm5q_##name##_avx512bf16
#include <omp.h>

#include "sparse_attention/attention.h"
#endif
