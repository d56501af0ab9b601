// Products of attention in bfloat16, summed in float by vdpbf16ps: two products a lane.
// A block of rows is laid out twice for it, so that a lane is a row in the first product and a
// feature in the second and neither ends in a sum across lanes:
//   keys   [dim / 2, BLOCK, 2]    pairs of features
//   pairs  [BLOCK / 2, value, 2]  pairs of rows
//   halves [heads, BLOCK]         softmax weights as bfloat16
#pragma once
#include <immintrin.h>

#include "sparse_attention/room.h"

namespace {

constexpr int ROW_VECTORS = 3;                // x 8 heads: 24 accumulators
constexpr int VALUE_HEADS = 4, VALUE_VECTORS = 4;   // 16 divide GLM-5's 512 features

static inline void hold(const Room& m, uint16_t* to, const char* from, int64_t dim, int dtype,
                        const float* fp8) {
  if (dtype == BF16) {
    memcpy(to, from, (size_t)dim * 2);
    return;
  }
  widen_row(m.row, from, dim, dtype, fp8);
  for (int64_t d = 0; d < dim; d++) to[d] = bf16_bits(m.row[d]);
}

static inline __m512bh cells(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

static inline __m512bh both(const uint16_t* from) {
  int32_t pair;
  memcpy(&pair, from, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// keys of 16 rows x 16 pairs of features: squares of side 8, 4, 2, 1 swap their off-diagonal halves.
static inline void turn(const uint16_t* rows, int64_t dim, uint16_t* keys) {
  __m512i x[16];
  for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(rows + i * dim);
#pragma GCC unroll 4
  for (int side = 8; side; side /= 2) {
    vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512i near = (__m512i)((lane & side) ? lane + 16 - side : lane);
    __m512i far = (__m512i)((lane & side) ? lane + 16 : lane + side);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & side)) {
        __m512i a = x[i], b = x[i + side];
        x[i] = _mm512_permutex2var_epi32(a, near, b);
        x[i + side] = _mm512_permutex2var_epi32(a, far, b);
      }
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(keys + i * BLOCK * 2, x[i]);
}

// logits[head][row] = query . row for HEADS_AT_ONCE heads and N vectors of rows.
template <int N>
static inline void logit_tile(const uint16_t* query, const uint16_t* keys, int64_t dim,
                              float* logits) {
  __m512 sums[HEADS_AT_ONCE][N];
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int j = 0; j < N; j++) sums[h][j] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 2) {
    __m512bh row[N];
    for (int j = 0; j < N; j++) row[j] = cells(keys + d * BLOCK + j * 32);
    for (int h = 0; h < HEADS_AT_ONCE; h++) {
      __m512bh x = both(query + h * dim + d);
      for (int j = 0; j < N; j++) sums[h][j] = _mm512_dpbf16_ps(sums[h][j], row[j], x);
    }
  }
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int j = 0; j < N; j++) _mm512_storeu_ps(logits + h * BLOCK + j * 16, sums[h][j]);
}

static void set_logits(const Room& m, int64_t count) {
  for (int64_t r = 0; r < count; r += 16)
    for (int64_t d = 0; d < m.dim; d += 32)
      turn(m.rows + r * m.dim + d, m.dim, m.keys + d * BLOCK + r * 2);
  for (int64_t h = 0; h < m.heads; h += HEADS_AT_ONCE) {
    const uint16_t* query = m.query + h * m.dim;
    float* logits = m.weights + h * BLOCK;
    int64_t r = 0;
    for (; r + 16 * (ROW_VECTORS - 1) < count; r += 16 * ROW_VECTORS)
      logit_tile<ROW_VECTORS>(query, m.keys + r * 2, m.dim, logits + r);
    for (; r < count; r += 16) logit_tile<1>(query, m.keys + r * 2, m.dim, logits + r);
  }
}

// out[head][vector] += sum over pairs of rows of weight x row, N vectors of 16 features.
template <int N>
static inline void value_tile(const uint16_t* weights, const uint16_t* pairs, int64_t value,
                              int64_t count, float* out) {
  __m512 sums[VALUE_HEADS][N];
  for (int h = 0; h < VALUE_HEADS; h++)
    for (int j = 0; j < N; j++) sums[h][j] = _mm512_loadu_ps(out + h * value + j * 16);
  for (int64_t r = 0; r < count; r += 2) {
    __m512bh row[N];
    for (int j = 0; j < N; j++) row[j] = cells(pairs + (r / 2 * value + j * 16) * 2);
    for (int h = 0; h < VALUE_HEADS; h++) {
      __m512bh x = both(weights + h * BLOCK + r);
      for (int j = 0; j < N; j++) sums[h][j] = _mm512_dpbf16_ps(sums[h][j], row[j], x);
    }
  }
  for (int h = 0; h < VALUE_HEADS; h++)
    for (int j = 0; j < N; j++) _mm512_storeu_ps(out + h * value + j * 16, sums[h][j]);
}

static inline vi wide(const uint16_t* from) {
  uint16_t __attribute__((vector_size(32))) x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, vi);
}

// pairs of two rows; features from m.dim on are 0.
static inline void pair_rows(const Room& m, const uint16_t* first, uint16_t* pairs) {
  int64_t real = min64(m.value, m.dim), d = 0;
  for (; d < real; d += 16) {
    vi a = wide(first + d), b = wide(first + m.dim + d);
    _mm512_storeu_si512(pairs + d * 2, (__m512i)(a | b << 16));
  }
  for (; d < m.value; d += 16) _mm512_storeu_si512(pairs + d * 2, _mm512_setzero_si512());
}

// out += weights x rows, `count` of them; weights beyond are 0, and so are rows beyond.
static void add_values(const Room& m, int64_t count) {
  narrow(m.halves, m.weights, m.heads * BLOCK, BF16);
  for (int64_t r = 0; r < count; r += 2)
    pair_rows(m, m.rows + r * m.dim, m.pairs + r * m.value);
  int64_t vectors = m.value / 16, j = 0;
  for (; j + VALUE_VECTORS <= vectors; j += VALUE_VECTORS)
    for (int64_t h = 0; h < m.heads; h += VALUE_HEADS)
      value_tile<VALUE_VECTORS>(m.halves + h * BLOCK, m.pairs + j * 32, m.value, count,
                                m.out + h * m.value + j * 16);
  for (; j < vectors; j++)
    for (int64_t h = 0; h < m.heads; h += VALUE_HEADS)
      value_tile<1>(m.halves + h * BLOCK, m.pairs + j * 32, m.value, count,
                    m.out + h * m.value + j * 16);
}

}  // namespace
