// Vectors of LANES floats through GCC's vector extension: one source for every instruction set.
// An isa_*.cpp sets LANES and the target before including; nothing here may call C++ library code,
// whose inline copies could be linked into another set's file.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

enum Dtype { F32 = 0, BF16 = 1, FP8 = 2, INT8 = 3, FP8_656 = 4, INT8_656 = 5 };

static inline vf load(const float* from) {
  vf v;
  memcpy(&v, from, sizeof v);
  return v;
}
static inline void store(float* to, vf v) { memcpy(to, &v, sizeof v); }
static inline vf splat(float x) { return x - vf{}; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
// Pairwise over the lanes. Masks are literals: from a loop they become a gather through memory.
#if LANES == 16
#define ACROSS_LANES(v, join)                                                            \
  v = join(v, shuffled(v, vi{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));    \
  v = join(v, shuffled(v, vi{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));    \
  v = join(v, shuffled(v, vi{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));    \
  v = join(v, shuffled(v, vi{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
#elif LANES == 8
#define ACROSS_LANES(v, join)                               \
  v = join(v, shuffled(v, vi{4, 5, 6, 7, 0, 1, 2, 3}));     \
  v = join(v, shuffled(v, vi{2, 3, 0, 1, 6, 7, 4, 5}));     \
  v = join(v, shuffled(v, vi{1, 0, 3, 2, 5, 4, 7, 6}));
#else
#define ACROSS_LANES(v, join)                   \
  v = join(v, shuffled(v, vi{2, 3, 0, 1}));     \
  v = join(v, shuffled(v, vi{1, 0, 3, 2}));
#endif

static inline vf shuffled(vf v, vi lanes) {
#if defined(__clang__)
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = v[lanes[i]];
  return out;
#else
  return __builtin_shuffle(v, lanes);
#endif
}
// rows[i][j] becomes rows[j][i], by halves: a lane whose index has bit `s` changes sides.
#if defined(__clang__)
static inline vf from_two(vf a, vf b, vi lanes) {
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
  return out;
}
#else
#define from_two(a, b, lanes) __builtin_shuffle(a, b, lanes)
#endif
#define LITERAL(...) vi __VA_ARGS__
#define EXCHANGE(rows, s, low, high)             \
  for (int i = 0; i < LANES; i++)                \
    if (!(i & s)) {                              \
      vf a = rows[i], b = rows[i + s];           \
      rows[i] = from_two(a, b, LITERAL low);       \
      rows[i + s] = from_two(a, b, LITERAL high);  \
    }
static inline void transpose(vf* rows) {
#if LANES == 16
  EXCHANGE(rows, 8, ({0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
           ({8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
  EXCHANGE(rows, 4, ({0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
           ({4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
  EXCHANGE(rows, 2, ({0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
           ({2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
  EXCHANGE(rows, 1, ({0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
           ({1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
#elif LANES == 8
  EXCHANGE(rows, 4, ({0, 1, 2, 3, 8, 9, 10, 11}), ({4, 5, 6, 7, 12, 13, 14, 15}))
  EXCHANGE(rows, 2, ({0, 1, 8, 9, 4, 5, 12, 13}), ({2, 3, 10, 11, 6, 7, 14, 15}))
  EXCHANGE(rows, 1, ({0, 8, 2, 10, 4, 12, 6, 14}), ({1, 9, 3, 11, 5, 13, 7, 15}))
#else
  EXCHANGE(rows, 2, ({0, 1, 4, 5}), ({2, 3, 6, 7}))
  EXCHANGE(rows, 1, ({0, 4, 2, 6}), ({1, 5, 3, 7}))
#endif
}
static inline vf vadd(vf a, vf b) { return a + b; }
static inline float lane_sum(vf v) {
  ACROSS_LANES(v, vadd)
  return v[0];
}
static inline float lane_max(vf v) {
  ACROSS_LANES(v, vmax)
  return v[0];
}

// exp for x <= 0 to 2e-7 relative (Cephes expf polynomial); 0 below -87.
static inline vf vexp(vf x) {
  const float magic = 12582912.0f;  // 1.5 x 2^23: adding it rounds to the nearest whole number
  vi tiny = x < splat(-87.0f);
  x = vmax(x, splat(-87.0f));
  vf shifted = x * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi bits = (vi)p + (((vi)shifted - 0x4B400000) << 23);
  return (vf)(tiny ? vi{} : bits);
}

static inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline void* aligned(int64_t bytes) {
  return aligned_alloc(64, (size_t)round_up(bytes > 0 ? bytes : 1, 64));
}

static inline float bf16_value(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}
static inline uint16_t bf16_bits(float x) {  // nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Writes floats as BF16, or as they are.
static inline void narrow(void* to, const float* from, int64_t count, int dtype) {
  if (dtype == BF16)
    for (int64_t i = 0; i < count; i++) ((uint16_t*)to)[i] = bf16_bits(from[i]);
  else
    memcpy(to, from, (size_t)count * 4);
}

// e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is NaN, no infinity.
static void fill_fp8(float* table) {
  for (int code = 0; code < 256; code++) {
    int exponent = (code >> 3) & 15, mantissa = code & 7;
    float x = exponent ? (float)(8 + mantissa) : (float)mantissa;
    for (int e = exponent ? exponent : 1; e < 10; e++) x *= 0.5f;
    for (int e = 10; e < exponent; e++) x *= 2.0f;
    if ((code & 127) == 127) x = __builtin_nanf("");
    table[code] = code & 128 ? -x : x;
  }
}

static inline void widen(float* to, const void* from, int64_t count, int dtype, const float* fp8) {
  if (dtype == F32) {
    memcpy(to, from, (size_t)count * 4);
  } else if (dtype == BF16) {
    const uint16_t* x = (const uint16_t*)from;
    for (int64_t i = 0; i < count; i++) to[i] = bf16_value(x[i]);
  } else if (dtype == FP8) {
    const uint8_t* x = (const uint8_t*)from;
    for (int64_t i = 0; i < count; i++) to[i] = fp8[x[i]];
  } else {
    const int8_t* x = (const int8_t*)from;
    for (int64_t i = 0; i < count; i++) to[i] = (float)x[i];
  }
}
