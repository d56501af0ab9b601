// What Python passes, field by field as in cpu.py of each op. Strides in bytes.
#pragma once
#include <stdint.h>

struct Rows {              // a cache's rows, packed or paged
  const char* base;
  int64_t page_stride, row_stride, page_size;
  const int32_t* pages;    // [sequences, pages_per_sequence], null: packed
  int64_t pages_per_sequence;
};

struct IndexerArgs {
  const char* query;       // [tokens, heads, dim]
  int64_t query_token_stride, query_head_stride;
  Rows key, key_scale;     // key_scale.base null: none
  const float* weights;    // [tokens, heads], query scales in them
  const int64_t *offsets, *key_offsets;
  int64_t sequences, heads, dim, topk, dtype, threads;
  int32_t* out;            // [tokens, topk]
};

struct TopkArgs {
  const float* scores;     // [rows, keys]
  int64_t row_stride, rows, keys, topk, threads;
  int32_t* out;            // [rows, topk]
};

struct AttentionArgs {
  const char* query;       // [tokens, heads, dim]
  int64_t query_token_stride, query_head_stride, query_dtype;
  Rows latent;
  int64_t latent_dtype;
  const int32_t* indices;  // [tokens, selected]
  int64_t index_stride;
  const int64_t *offsets, *key_offsets;
  int64_t sequences, tokens, heads, dim, value_dim, selected, threads;
  float scale;
  char* out;               // [tokens, heads, value_dim] in query_dtype
  float* lse;              // [tokens, heads]
};

struct GemmArgs {
  const int8_t* x;         // [rows, columns]
  int64_t x_stride;
  const float* x_scale;    // [rows], null: 1
  const uint8_t* weight;   // prepared, see gemm.h
  const float* scale;      // [experts, panels, groups, panel]
  const int64_t* offsets;  // [experts + 1]
  int64_t experts, rows, columns, out_features, group, bits, threads;
  void* out;               // [rows, out_features]
  int64_t out_dtype;
};

struct SwigluArgs {
  const float* both;       // [rows, 2 x inner]: gate, then up
  int64_t rows, inner, threads;
  int8_t* codes;           // [rows, inner]
  float* scale;            // [rows]
};

static inline const char* row_at(const Rows& rows, int64_t sequence, int64_t first, int64_t position) {
  if (!rows.pages) return rows.base + (first + position) * rows.row_stride;
  int64_t page = rows.pages[sequence * rows.pages_per_sequence + position / rows.page_size];
  return rows.base + page * rows.page_stride + position % rows.page_size * rows.row_stride;
}
