// Grouped product of int8 activations with int4 or int8 weights: each group's sum in int32, exactly,
// then float32 scales. The integer dot differs by instruction set, dot.h; the rest is here.
//
// Prepared weights, per expert and panel of PANEL output features, are bytes in this order:
//   int4  [columns / 8, PANEL, 4]: the low nibble is column 8i + j, the high one 8i + 4 + j, code + 8
//   int8  [columns / 4, PANEL, 4]: column 4i + j, code + 128
// Codes are unsigned there, so a group's sum is corrected by the offset x the sum of its x.
#pragma once
#include "csrc/args.h"
#include "csrc/vec.h"
#include "expert_gemm/dot.h"

namespace {

constexpr int PANEL = LANES;          // output features of a vector of sums
constexpr int TASK_BYTES = 48 * 6144;  // of x: stays in a core's L2 while the weights pass

template <int BITS>
struct Product {                      // rows of one expert's x, padded with zeros to `columns`
  const typename Tile<BITS>::X* x;    // [rows, columns]
  const int32_t* start;               // [rows, groups]: -offset of the codes x the sum of x
  const float* x_scale;
  const uint8_t* weight;
  const float* scale;                 // [panels, groups, PANEL]
  int64_t rows, columns, groups, group, panels, out_features, panel_bytes;
};

// A function of its own: inlined, GCC 12 keeps the sums on the stack (256 rows: 20 ms, not 16).
template <int BITS, int ROWS, int PANELS>
__attribute__((noinline)) static void product_tile(const Product<BITS>& p, int64_t row,
                                                   int64_t panel, vf (*result)[PANELS]) {
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < PANELS; c++) result[r][c] = vf{};
  for (int64_t g = 0; g < p.groups; g++) {
    vi sums[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < PANELS; c++) sums[r][c] = p.start[(row + r) * p.groups + g] - vi{};
    const auto* x = p.x + row * p.columns + g * p.group;
    const uint8_t* w = p.weight + panel * p.panel_bytes + g * p.group * PANEL * BITS / 8;
    int64_t length = min64(p.group, p.columns - g * p.group);
    group_dot<BITS, ROWS, PANELS>(x, p.columns, w, p.panel_bytes, length, sums);
    for (int c = 0; c < PANELS; c++) {
      vf scale = load(p.scale + ((panel + c) * p.groups + g) * PANEL);
      for (int r = 0; r < ROWS; r++)
        result[r][c] += __builtin_convertvector(sums[r][c], vf) * scale;
    }
  }
}

template <int BITS, int ROWS, int PANELS>
static void write_tile(const Product<BITS>& p, int64_t row, int64_t panel, void* out, int64_t dtype) {
  vf result[ROWS][PANELS];
  product_tile<BITS, ROWS, PANELS>(p, row, panel, result);
  for (int r = 0; r < ROWS; r++) {
    float x_scale = p.x_scale ? p.x_scale[row + r] : 1.0f;
    for (int c = 0; c < PANELS; c++) {
      int64_t first = (panel + c) * PANEL, at = (row + r) * p.out_features + first;
      int64_t width = min64(PANEL, p.out_features - first);
      vf y = result[r][c] * x_scale;
      for (int64_t i = 0; i < width; i++) {
        if (dtype == BF16)
          ((uint16_t*)out)[at + i] = bf16_bits(y[i]);
        else
          ((float*)out)[at + i] = y[i];
      }
    }
  }
}

template <int BITS, int ROWS, int PANELS>
static void product_rows(const Product<BITS>& p, int64_t row, int64_t high, int64_t panel, void* out,
                         int64_t dtype) {
  for (; row + ROWS <= high; row += ROWS) write_tile<BITS, ROWS, PANELS>(p, row, panel, out, dtype);
  if constexpr (ROWS > 1) product_rows<BITS, ROWS - 1, PANELS>(p, row, high, panel, out, dtype);
}

// Copies x, padded by zeros to whole steps, and says where each group's sum starts.
template <typename X>
static void pad_row(const GemmArgs& a, int64_t row, int64_t columns, int64_t groups, X* x,
                    int32_t* starts) {
  const int8_t* from = a.x + row * a.x_stride;
  for (int64_t i = 0; i < columns; i++) x[row * columns + i] = i < a.columns ? from[i] : 0;
  for (int64_t g = 0; g < groups; g++) {
    int32_t sum = 0;
    int64_t end = min64((g + 1) * a.group, a.columns);
    for (int64_t i = g * a.group; i < end; i++) sum += from[i];
    starts[row * groups + g] = -sum * (a.bits == 4 ? 8 : 128);
  }
}

template <int BITS>
static int product_experts(const GemmArgs& a) {
  constexpr int PANELS = Tile<BITS>::PANELS, ROWS = Tile<BITS>::ROWS;
  typedef typename Tile<BITS>::X X;
  int64_t columns = round_up(a.columns, 8), groups = (a.columns + a.group - 1) / a.group;
  int64_t panels = round_up(a.out_features, PANEL) / PANEL;
  int64_t panel_bytes = columns * PANEL * BITS / 8, strips = (panels + PANELS - 1) / PANELS;
  int64_t element = a.out_dtype == BF16 ? 2 : 4;
  int64_t task_rows = round_up(TASK_BYTES / (columns * (int64_t)sizeof(X)) + 1, ROWS);
  X* x = (X*)aligned(a.rows * columns * (int64_t)sizeof(X));
  int32_t* starts = (int32_t*)aligned(a.rows * groups * 4);
  int failed = !x || !starts;
#pragma omp parallel num_threads((int)a.threads) if (!failed)
  if (!failed) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.rows; row++) pad_row(a, row, columns, groups, x, starts);
    for (int64_t expert = 0; expert < a.experts; expert++) {
      int64_t start = a.offsets[expert], rows = a.offsets[expert + 1] - start;
      Product<BITS> p = {x + start * columns, starts + start * groups,
                         a.x_scale ? a.x_scale + start : nullptr,
                         a.weight + expert * panels * panel_bytes,
                         a.scale + expert * panels * groups * PANEL,
                         rows, columns, groups, a.group, panels, a.out_features, panel_bytes};
      char* out = (char*)a.out + start * a.out_features * element;
      int64_t blocks = (rows + task_rows - 1) / task_rows;
#pragma omp for schedule(dynamic, 4) nowait
      for (int64_t task = 0; task < blocks * strips; task++) {
        int64_t low = task / strips * task_rows, high = min64(low + task_rows, rows);
        int64_t panel = task % strips * PANELS;
        if (panel + PANELS <= panels)
          product_rows<BITS, ROWS, PANELS>(p, low, high, panel, out, a.out_dtype);
        else
          product_rows<BITS, ROWS, 1>(p, low, high, panel, out, a.out_dtype);
      }
    }
  }
  free(x), free(starts);
  return failed;
}

}  // namespace

// Returns 0, or 1 where memory ran out.
extern "C" int ENTRY(expert_gemm)(const GemmArgs* a) {
  return a->bits == 4 ? product_experts<4>(*a) : product_experts<8>(*a);
}

// codes = silu(gate) x up on each row's own grid of absmax / 127.
extern "C" int ENTRY(swiglu)(const SwigluArgs* args) {
  const SwigluArgs& a = *args;
  int failed = 0;
#pragma omp parallel num_threads((int)a.threads)
  {
    float* y = (float*)aligned(round_up(a.inner, LANES) * 4);
    if (!y) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.rows; row++) {
      if (failed) continue;
      const float *gate = a.both + row * 2 * a.inner, *up = gate + a.inner;
      float reach = 0;
      for (int64_t i = 0; i < a.inner; i++) {
        float e = __builtin_expf(-__builtin_fabsf(gate[i]));  // never overflows
        float sigmoid = gate[i] >= 0 ? 1.0f / (1.0f + e) : e / (1.0f + e);
        y[i] = gate[i] * sigmoid * up[i];
        float size = __builtin_fabsf(y[i]);
        reach = size > reach ? size : reach;
      }
      float scale = reach > 0 ? reach / 127.0f : 1.0f;
      a.scale[row] = scale;
      for (int64_t i = 0; i < a.inner; i++)
        a.codes[row * a.inner + i] = (int8_t)__builtin_rintf(y[i] / scale);
    }
    free(y);
  }
  return failed;
}
