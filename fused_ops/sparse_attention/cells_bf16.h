// Products of attention in bfloat16, summed in float by vdpbf16ps: two products a lane.
#pragma once
#include <immintrin.h>

#include "sparse_attention/room.h"

namespace {

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

// logits[head][row] = query . row for HEADS_AT_ONCE x ROWS_AT_ONCE, pairs of lanes along dim.
static inline void logit_tile(const uint16_t* query, const uint16_t* rows, int64_t dim,
                              float* logits) {
  __m512 sums[HEADS_AT_ONCE][ROWS_AT_ONCE];
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int r = 0; r < ROWS_AT_ONCE; r++) sums[h][r] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 32) {
    __m512bh row[ROWS_AT_ONCE];
    for (int r = 0; r < ROWS_AT_ONCE; r++) row[r] = cells(rows + r * dim + d);
    for (int h = 0; h < HEADS_AT_ONCE; h++) {
      __m512bh x = cells(query + h * dim + d);
      for (int r = 0; r < ROWS_AT_ONCE; r++) sums[h][r] = _mm512_dpbf16_ps(sums[h][r], x, row[r]);
    }
  }
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int r = 0; r < ROWS_AT_ONCE; r++) logits[h * BLOCK + r] = lane_sum((vf)sums[h][r]);
}

// out[head][vector] += sum over pairs of rows of weight x row, N vectors of 16 features.
template <int N>
static inline void value_tile(const uint16_t* weights, const uint16_t* pairs, int64_t value,
                              int64_t count, float* out) {
  __m512 sums[HEADS_AT_ONCE][N];
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int j = 0; j < N; j++) sums[h][j] = _mm512_loadu_ps(out + h * value + j * 16);
  for (int64_t r = 0; r < count; r += 2) {
    __m512bh row[N];
    for (int j = 0; j < N; j++) row[j] = cells(pairs + (r / 2 * value + j * 16) * 2);
    for (int h = 0; h < HEADS_AT_ONCE; h++) {
      int32_t both;
      memcpy(&both, weights + h * BLOCK + r, 4);
      __m512bh x = (__m512bh)_mm512_set1_epi32(both);
      for (int j = 0; j < N; j++) sums[h][j] = _mm512_dpbf16_ps(sums[h][j], x, row[j]);
    }
  }
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int j = 0; j < N; j++) _mm512_storeu_ps(out + h * value + j * 16, sums[h][j]);
}

// out += weights x rows, `count` of them; weights beyond are 0, and so are rows beyond.
static void add_values(const Room& m, int64_t count) {
  for (int64_t i = 0; i < m.heads * BLOCK; i++) m.halves[i] = bf16_bits(m.weights[i]);
  for (int64_t r = 0; r < count; r += 2)
    for (int64_t d = 0; d < m.value; d++) {
      bool inside = d < m.dim;
      m.pairs[(r / 2 * m.value + d) * 2] = inside ? m.rows[r * m.dim + d] : 0;
      m.pairs[(r / 2 * m.value + d) * 2 + 1] = inside ? m.rows[(r + 1) * m.dim + d] : 0;
    }
  int64_t vectors = m.value / 16, j = 0;
  for (; j + VECTORS_AT_ONCE <= vectors; j += VECTORS_AT_ONCE)
    for (int64_t h = 0; h < m.heads; h += HEADS_AT_ONCE)
      value_tile<VECTORS_AT_ONCE>(m.halves + h * BLOCK, m.pairs + j * 32, m.value, count,
                                  m.out + h * m.value + j * 16);
  for (; j < vectors; j++)
    for (int64_t h = 0; h < m.heads; h += HEADS_AT_ONCE)
      value_tile<1>(m.halves + h * BLOCK, m.pairs + j * 32, m.value, count,
                    m.out + h * m.value + j * 16);
}

}  // namespace
