// One thread's memory for attention, and rows as floats.
#pragma once
#include "csrc/args.h"
#include "csrc/vec.h"

namespace {

#if defined(GLM5Q_BF16)
typedef uint16_t Cell;  // bfloat16
constexpr int HEADS_AT_ONCE = 8, ROWS_AT_ONCE = LANES;
#else
typedef float Cell;
constexpr int HEADS_AT_ONCE = 4, ROWS_AT_ONCE = REGISTERS == 32 ? 6 : 3;  // accumulators: 24 or 12
#endif

constexpr int BLOCK = 96;         // rows gathered at a time
constexpr int LATENT = 512, SCALE_TILE = 128;

struct Room {
  Cell *query, *rows;             // [heads, dim], [BLOCK, dim]
  float *weights, *out;           // [heads, BLOCK], [heads, value]
  float *top, *sum;               // [heads], the running maximum and sum of weights
  float* row;                     // [dim], one row as floats
  Cell *keys, *pairs, *halves;    // bfloat16: see cells_bf16.h
  const char** selected;          // addresses of the selected rows
  int64_t heads, dim, value;      // padded
};

static inline bool make_room(Room* m, const AttentionArgs& a) {
  int64_t cell = (int64_t)sizeof(Cell);
  m->heads = round_up(a.heads, HEADS_AT_ONCE);
  m->dim = round_up(a.dim, LANES * 4 / cell), m->value = round_up(a.value_dim, LANES);
  m->query = (Cell*)aligned(m->heads * m->dim * cell);
  m->rows = (Cell*)aligned(BLOCK * m->dim * cell);
  m->weights = (float*)aligned(m->heads * BLOCK * 4);
  m->out = (float*)aligned(m->heads * m->value * 4);
  m->top = (float*)aligned(m->heads * 4), m->sum = (float*)aligned(m->heads * 4);
  m->row = (float*)aligned(m->dim * 4);
  m->keys = (Cell*)aligned(BLOCK * m->dim * cell);
  m->pairs = (Cell*)aligned(BLOCK * m->value * cell);
  m->halves = (Cell*)aligned(m->heads * BLOCK * cell);
  m->selected = (const char**)aligned(a.selected * 8);
  return m->query && m->rows && m->weights && m->out && m->top && m->sum && m->row && m->keys &&
         m->pairs && m->halves && m->selected;
}

static inline void free_room(const Room& m) {
  free(m.query), free(m.rows), free(m.weights), free(m.out), free(m.top), free(m.sum);
  free(m.row), free(m.keys), free(m.pairs), free(m.halves), free(m.selected);
}

// Rows of 656 bytes: 512 codes, then 4 scales and the rotated part (fp8) or these two swapped (int8).
static void widen_row(float* to, const char* from, int64_t dim, int dtype, const float* fp8) {
  if (dtype != FP8_656 && dtype != INT8_656) return widen(to, from, dim, dtype, fp8);
  bool scales_first = dtype == FP8_656;
  const char* scale_at = from + LATENT + (scales_first ? 0 : 2 * (dim - LATENT));
  const char* rope_at = from + LATENT + (scales_first ? 4 * (LATENT / SCALE_TILE) : 0);
  widen(to, from, LATENT, dtype == FP8_656 ? FP8 : INT8, fp8);
  for (int tile = 0; tile < LATENT / SCALE_TILE; tile++) {
    float scale;
    memcpy(&scale, scale_at + 4 * tile, 4);
    for (int i = 0; i < SCALE_TILE; i++) to[tile * SCALE_TILE + i] *= scale;
  }
  widen(to + LATENT, rope_at, dim - LATENT, BF16, fp8);
}

}  // namespace
