// Whatever the compiler's default is (SSE2 on x86-64, NEON on ARM), and which sets this CPU has.
#define LANES 4
#define REGISTERS 16
#define ENTRY(name) glm5q_##name##_portable
#include "all_ops.h"

// 1 if the file for `isa` was compiled here and this CPU runs it. 0 portable, 1 AVX2, 2 AVX-512, 3 with bf16.
extern "C" int glm5q_runs(int isa) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
  if (isa == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == 2) return wide && __builtin_cpu_supports("avx512vnni");
  if (isa == 3) return wide && __builtin_cpu_supports("avx512bf16");
#endif
  return isa == 0;
}
