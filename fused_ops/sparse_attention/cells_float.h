// Products of attention in floats.
#pragma once
#include "sparse_attention/room.h"

namespace {

static inline void hold(const Room&, float* to, const char* from, int64_t dim, int dtype,
                        const float* fp8) {
  widen_row(to, from, dim, dtype, fp8);
}

// logits[head][row] = query . row for HEADS_AT_ONCE x ROWS_AT_ONCE, lanes along dim.
static inline void logit_tile(const float* query, const float* rows, int64_t dim, float* logits) {
  vf sums[HEADS_AT_ONCE][ROWS_AT_ONCE] = {};
#pragma GCC unroll 2
  for (int64_t d = 0; d < dim; d += LANES)
    for (int h = 0; h < HEADS_AT_ONCE; h++) {
      vf x = load(query + h * dim + d);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS_AT_ONCE; r++) sums[h][r] += x * load(rows + r * dim + d);
    }
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int r = 0; r < ROWS_AT_ONCE; r++) logits[h * BLOCK + r] = lane_sum(sums[h][r]);
}

static void set_logits(const Room& m, int64_t count) {
  for (int64_t h = 0; h < m.heads; h += HEADS_AT_ONCE)
    for (int64_t r = 0; r < count; r += ROWS_AT_ONCE)
      logit_tile(m.query + h * m.dim, m.rows + r * m.dim, m.dim, m.weights + h * BLOCK + r);
}

constexpr int VECTORS_AT_ONCE = ROWS_AT_ONCE;

// out[head][vector] += sum over `count` rows of weight x row, N vectors of LANES features.
template <int N>
static inline void value_tile(const float* weights, const float* rows, int64_t dim, int64_t count,
                              float* out, int64_t value) {
  vf sums[HEADS_AT_ONCE][N];
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int j = 0; j < N; j++) sums[h][j] = load(out + h * value + j * LANES);
#pragma GCC unroll 2
  for (int64_t r = 0; r < count; r++)
    for (int h = 0; h < HEADS_AT_ONCE; h++) {
      vf x = splat(weights[h * BLOCK + r]);
#pragma GCC unroll 6
      for (int j = 0; j < N; j++) sums[h][j] += x * load(rows + r * dim + j * LANES);
    }
  for (int h = 0; h < HEADS_AT_ONCE; h++)
    for (int j = 0; j < N; j++) store(out + h * value + j * LANES, sums[h][j]);
}

// out += weights x rows, `count` of them.
static void add_values(const Room& m, int64_t count) {
  int64_t vectors = m.value / LANES, j = 0;
  for (; j + VECTORS_AT_ONCE <= vectors; j += VECTORS_AT_ONCE)
    for (int64_t h = 0; h < m.heads; h += HEADS_AT_ONCE)
      value_tile<VECTORS_AT_ONCE>(m.weights + h * BLOCK, m.rows + j * LANES, m.dim, count,
                                  m.out + h * m.value + j * LANES, m.value);
  for (; j < vectors; j++)
    for (int64_t h = 0; h < m.heads; h += HEADS_AT_ONCE)
      value_tile<1>(m.weights + h * BLOCK, m.rows + j * LANES, m.dim, count,
                    m.out + h * m.value + j * LANES, m.value);
}

}  // namespace
