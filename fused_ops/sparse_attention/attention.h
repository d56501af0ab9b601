// Sparse Flash Attention: gathers blocks of selected rows as floats, softmax kept running.
// Per token: Q, a block of rows and the output stay in a core's L2 (147 + 110 + 131 KB for GLM-5).
// Products are of floats, or of bfloat16 where the CPU has them: cells_float.h, cells_bf16.h.
#pragma once
#include "csrc/args.h"
#include "csrc/vec.h"
#include "sparse_attention/room.h"
#if defined(GLM5Q_BF16)
#include "sparse_attention/cells_bf16.h"
#else
#include "sparse_attention/cells_float.h"
#endif

namespace {

constexpr int SPLIT_ROWS = 256;  // a part's rows where a few tokens must fill all threads
constexpr int FEW_TOKENS = 8;    // a constant, so that results do not depend on the thread count

// Turns one head's logits into weights relative to the running maximum; `count` of BLOCK are real.
static inline void soften(const Room& m, int64_t head, int64_t count, float scale) {
  float* logits = m.weights + head * BLOCK;
  for (int64_t r = 0; r < BLOCK; r++) logits[r] = r < count ? logits[r] * scale : -__builtin_inff();
  vf best = load(logits);
  for (int r = LANES; r < BLOCK; r += LANES) best = vmax(best, load(logits + r));
  float top = lane_max(best), before = m.top[head];
  if (top > before) {
    float shrink = __builtin_expf(before - top);  // 0 the first time
    for (int64_t d = 0; d < m.value; d += LANES)
      store(m.out + head * m.value + d, load(m.out + head * m.value + d) * shrink);
    m.sum[head] *= shrink;
    m.top[head] = top;
  }
  vf total = {};
  for (int r = 0; r < BLOCK; r += LANES) {
    vf weight = vexp(load(logits + r) - m.top[head]);
    total += weight;
    store(logits + r, weight);
  }
  m.sum[head] += lane_sum(total);
}

static void attend_block(const Room& m, int64_t count, float scale) {
  set_logits(m, count);
  for (int64_t h = 0; h < m.heads; h++) soften(m, h, count, scale);
  add_values(m, count);
}

// Attention of one token over the part [low, high) of its selection, left unnormalised in `m`.
static void attend(const AttentionArgs& a, const Room& m, int64_t sequence, int64_t token,
                   int64_t low, int64_t high, const float* fp8) {
  int64_t first = a.key_offsets[sequence], keys = a.key_offsets[sequence + 1] - first, count = 0;
  const int32_t* indices =
      (const int32_t*)((const char*)a.indices + token * a.index_stride);
  for (int64_t i = low; i < high; i++)
    if (indices[i] >= 0 && indices[i] < keys)
      m.selected[count++] = row_at(a.latent, sequence, first, indices[i]);
  memset(m.query, 0, (size_t)(m.heads * m.dim) * sizeof(Cell));
  memset(m.out, 0, (size_t)(m.heads * m.value) * 4);
  for (int64_t h = 0; h < m.heads; h++) m.top[h] = -__builtin_inff(), m.sum[h] = 0;
  for (int64_t h = 0; h < a.heads; h++)
    hold(m, m.query + h * m.dim,
         a.query + token * a.query_token_stride + h * a.query_head_stride, a.dim,
         (int)a.query_dtype, fp8);
  for (int64_t r = 0; r < BLOCK; r++)
    for (int64_t d = a.dim; d < m.dim; d++) m.rows[r * m.dim + d] = 0;
  for (int64_t block = 0; block < count; block += BLOCK) {
    int64_t held = min64(BLOCK, count - block), r = 0;
    for (; r < held; r++) {
      if (block + r + 4 < count) __builtin_prefetch(m.selected[block + r + 4]);
      hold(m, m.rows + r * m.dim, m.selected[block + r], a.dim, (int)a.latent_dtype, fp8);
    }
    for (; r < round_up(held, ROWS_AT_ONCE); r++)
      memset(m.rows + r * m.dim, 0, (size_t)m.dim * sizeof(Cell));
    attend_block(m, held, a.scale);
  }
}

// Writes one head from `parts` unnormalised results, summed into the first of them; their tops and
// sums lie `stride` apart.
static void finish(const AttentionArgs& a, int64_t token, int64_t head, float* out,
                   const float* top, const float* sum, int64_t parts, int64_t stride,
                   int64_t part_stride) {
  float best = -__builtin_inff(), total = 0;
  for (int64_t p = 0; p < parts; p++) best = top[p * stride] > best ? top[p * stride] : best;
  bool any = best > -__builtin_inff();
  for (int64_t p = 0; p < parts && any; p++)
    total += sum[p * stride] * __builtin_expf(top[p * stride] - best);
  a.lse[token * a.heads + head] = any ? best + __builtin_logf(total) : -__builtin_inff();
  for (int64_t p = 0; p < parts && any; p++) {  // with none, `out` is zeros
    float weight = __builtin_expf(top[p * stride] - best) / total;
    const float* part = out + p * part_stride;
    for (int64_t d = 0; d < a.value_dim; d++) out[d] = part[d] * weight + (p ? out[d] : 0.0f);
  }
  int64_t element = a.query_dtype == BF16 ? 2 : 4;
  narrow(a.out + (token * a.heads + head) * a.value_dim * element, out, a.value_dim,
         (int)a.query_dtype);
}

}  // namespace

// Returns 0, or 1 where memory ran out.
extern "C" int ENTRY(sparse_attention)(const AttentionArgs* args) {
  const AttentionArgs& a = *args;
  float fp8[256];
  fill_fp8(fp8);
  int64_t parts = a.tokens < FEW_TOKENS ? (a.selected + SPLIT_ROWS - 1) / SPLIT_ROWS : 1;
  if (parts < 1) parts = 1;
  int64_t heads = round_up(a.heads, HEADS_AT_ONCE), value = round_up(a.value_dim, LANES);
  int64_t held = parts > 1 ? a.tokens * parts : 0;
  float* outs = (float*)aligned(held * heads * value * 4);
  float* tops = (float*)aligned(held * heads * 4);
  float* sums = (float*)aligned(held * heads * 4);
  int failed = !outs || !tops || !sums;
#pragma omp parallel num_threads((int)a.threads)
  {
    Room m = {};
    if (!make_room(&m, a)) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp barrier
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < a.tokens * parts; task++) {
      if (failed) continue;
      int64_t token = task / parts, part = task % parts, sequence = 0;
      while (a.offsets[sequence + 1] <= token) sequence++;
      int64_t low = parts > 1 ? part * SPLIT_ROWS : 0;
      int64_t high = parts > 1 ? min64(low + SPLIT_ROWS, a.selected) : a.selected;
      attend(a, m, sequence, token, low, high, fp8);
      if (parts == 1) {
        for (int64_t h = 0; h < a.heads; h++)
          finish(a, token, h, m.out + h * value, m.top + h, m.sum + h, 1, 0, 0);
      } else {
        memcpy(outs + task * heads * value, m.out, (size_t)(heads * value) * 4);
        memcpy(tops + task * heads, m.top, (size_t)heads * 4);
        memcpy(sums + task * heads, m.sum, (size_t)heads * 4);
      }
    }
    if (parts > 1 && !failed) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < a.tokens * a.heads; i++) {
        int64_t token = i / a.heads, h = i % a.heads, at = token * parts * heads + h;
        finish(a, token, h, outs + at * value, tops + at, sums + at, parts, heads, heads * value);
      }
    }
    free_room(m);
  }
  free(outs), free(tops), free(sums);
  return failed;
}
