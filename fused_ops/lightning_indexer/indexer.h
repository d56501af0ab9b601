// Lightning Indexer: scores of a chunk of queries in registers, then an exact radix selection.
// Scores of at most SCORE_BYTES are held at once, so memory does not grow with queries x keys.
#pragma once
#include "csrc/args.h"
#include "csrc/vec.h"

namespace {

constexpr int HEAD_TILE = 4, KEY_VECTORS = REGISTERS == 32 ? 6 : 3;  // accumulators: 24 or 12
constexpr int KEY_TILE = KEY_VECTORS * LANES;
constexpr int QUERY_BLOCK = 16;   // x 32 heads x 128 floats = 256 KB: half of a core's L2
constexpr int KEY_BLOCK = 32;     // key tiles a task
constexpr int64_t SCORE_BYTES = 64 << 20;

// Radix bits a pass: 11 + 11 + 10 = 32.
constexpr int BINS = 2048;

// Orders floats as unsigned: -0 equals +0, NaN of positive sign is largest, as torch.sort has it.
static inline uint32_t order(float score) {
  float canonical = score + 0.0f;
  uint32_t bits;
  memcpy(&bits, &canonical, 4);
  return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}
constexpr uint32_t MINUS_INFINITY = 0x007fffffu;  // order(-inf): never chosen

// Finds the bin, counted from the top, in which the `room`-th largest lies; room becomes its rank.
static inline uint32_t descend(const uint32_t* bins, int64_t* room) {
  uint32_t bin = BINS - 1;
  while (bin > 0 && (int64_t)bins[bin] < *room) *room -= bins[bin--];
  return bin;
}

// Writes the positions of the `topk` largest scores, ascending, ties to the lowest, then -1.
static void select_row(const float* scores, int64_t count, int64_t topk, int32_t* out,
                       uint32_t* keys, uint32_t* candidates) {
  int64_t eligible = 0, written = 0;
  for (int64_t i = 0; i < count; i++) {
    keys[i] = order(scores[i]);
    eligible += keys[i] > MINUS_INFINITY;
  }
  uint32_t threshold = MINUS_INFINITY;
  int64_t room = 0;  // how many keys equal to the threshold are taken
  if (eligible > topk) {
    uint32_t bins[BINS];
    room = topk;
    memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < count; i++) bins[keys[i] >> 21]++;
    uint32_t high = descend(bins, &room);
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
      candidates[found] = keys[i];
      found += keys[i] >> 21 == high;
    }
    memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < found; i++) bins[candidates[i] >> 10 & 2047]++;
    uint32_t middle = descend(bins, &room), prefix = high << 11 | middle;
    memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < found; i++)
      if (candidates[i] >> 10 == prefix) bins[candidates[i] & 1023]++;
    threshold = prefix << 10 | descend(bins, &room);
  }
  for (int64_t i = 0; i < count && written < topk; i++) {
    bool equal = keys[i] == threshold && room > 0;
    room -= equal;
    out[written] = (int32_t)i;
    written += keys[i] > threshold || equal;
  }
  for (; written < topk; written++) out[written] = -1;
}

// score[KEY_TILE] += sum over HEAD_TILE heads of weight x ReLU(query . key), a fixed order of sums.
static inline void score_tile(const float* query, int64_t dim, const float* keys,
                              const float* weights, vf* score) {
  vf sums[HEAD_TILE][KEY_VECTORS] = {};
  for (int64_t d = 0; d < dim; d++) {
    for (int h = 0; h < HEAD_TILE; h++) {
      vf x = splat(query[h * dim + d]);
#pragma GCC unroll 6
      for (int j = 0; j < KEY_VECTORS; j++)
        sums[h][j] += x * load(keys + (d * KEY_VECTORS + j) * LANES);
    }
  }
  for (int h = 0; h < HEAD_TILE; h++)
    for (int j = 0; j < KEY_VECTORS; j++)
      score[j] += splat(weights[h]) * vmax(sums[h][j], vf{});
}

struct Chunk {           // some queries of one sequence against all its keys
  const float *queries;  // [rows, padded heads, dim]
  const float *weights;  // [rows, padded heads]
  const float *keys;     // [tiles, dim, KEY_TILE]
  const float *key_scale;
  float* scores;         // [rows, tiles x KEY_TILE]
  int64_t rows, heads, dim, tiles, past;  // past: keys before the first query
};

static void score_block(const Chunk& c, int64_t row_block, int64_t key_block) {
  int64_t row_end = min64(c.rows, (row_block + 1) * QUERY_BLOCK);
  int64_t tile_end = min64(c.tiles, (key_block + 1) * KEY_BLOCK);
  for (int64_t tile = key_block * KEY_BLOCK; tile < tile_end; tile++) {
    const float* keys = c.keys + tile * c.dim * KEY_TILE;
    for (int64_t row = row_block * QUERY_BLOCK; row < row_end; row++) {
      if (tile * KEY_TILE > c.past + row) continue;  // wholly after the query
      vf score[KEY_VECTORS] = {};
      for (int64_t h = 0; h < c.heads; h += HEAD_TILE)
        score_tile(c.queries + (row * c.heads + h) * c.dim, c.dim, keys,
                   c.weights + row * c.heads + h, score);
      float* out = c.scores + row * c.tiles * KEY_TILE + tile * KEY_TILE;
      for (int j = 0; j < KEY_VECTORS; j++) {
        vf scale = c.key_scale ? load(c.key_scale + tile * KEY_TILE + j * LANES) : splat(1.0f);
        store(out + j * LANES, score[j] * scale);
      }
    }
  }
}

// keys [tiles, dim, KEY_TILE] of one sequence, zero beyond its last; scales likewise. `row` has
// room for LANES keys.
static void pack_tile(const IndexerArgs& a, int64_t sequence, int64_t count, int64_t tile,
                      float* keys, float* scales, float* row, const float* fp8) {
  int64_t first = a.key_offsets[sequence], whole = a.dim / LANES * LANES;
  float* to = keys + tile * a.dim * KEY_TILE;
  for (int group = 0; group < KEY_TILE; group += LANES) {  // of LANES keys, turned block by block
    for (int lane = 0; lane < LANES; lane++) {
      int64_t position = tile * KEY_TILE + group + lane;
      bool inside = position < count;
      float* mine = row + lane * a.dim;
      if (inside)
        widen(mine, row_at(a.key, sequence, first, position), a.dim, (int)a.dtype, fp8);
      else
        memset(mine, 0, (size_t)a.dim * 4);
      if (a.key_scale.base)
        scales[position] =
            inside ? *(const float*)row_at(a.key_scale, sequence, first, position) : 0;
    }
    for (int64_t d = 0; d < whole; d += LANES) {
      vf block[LANES];
      for (int lane = 0; lane < LANES; lane++) block[lane] = load(row + lane * a.dim + d);
      transpose(block);
      for (int i = 0; i < LANES; i++) store(to + (d + i) * KEY_TILE + group, block[i]);
    }
    for (int64_t d = whole; d < a.dim; d++)
      for (int lane = 0; lane < LANES; lane++)
        to[d * KEY_TILE + group + lane] = row[lane * a.dim + d];
  }
}

static int index_sequence(const IndexerArgs& a, int64_t sequence, const float* fp8) {
  int64_t start = a.offsets[sequence], tokens = a.offsets[sequence + 1] - start;
  int64_t count = a.key_offsets[sequence + 1] - a.key_offsets[sequence];
  int64_t tiles = round_up(count, KEY_TILE) / KEY_TILE, width = tiles * KEY_TILE;
  int64_t heads = round_up(a.heads, HEAD_TILE);
  int64_t chunk = round_up(min64(tokens, 1024), QUERY_BLOCK);
  while (chunk > QUERY_BLOCK && chunk * width * 4 > SCORE_BYTES) chunk -= QUERY_BLOCK;
  int threads = (int)a.threads;
  float* keys = (float*)aligned(width * a.dim * 4);
  float* scales = (float*)aligned(width * 4);
  float* queries = (float*)aligned(chunk * heads * a.dim * 4);
  float* weights = (float*)aligned(chunk * heads * 4);
  float* scores = (float*)aligned(chunk * width * 4);
  float* rows = (float*)aligned(threads * round_up(LANES * a.dim, 16) * 4);
  uint32_t* scratch = (uint32_t*)aligned(threads * 2 * width * 4);
  bool failed = !keys || !scales || !queries || !weights || !scores || !rows || !scratch;
#pragma omp parallel num_threads(threads) if (!failed)
  if (!failed) {
    int me = omp_get_thread_num();
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++)
      pack_tile(a, sequence, count, tile, keys, scales,
                rows + me * round_up(LANES * a.dim, 16), fp8);
    for (int64_t low = 0; low < tokens; low += chunk) {
      int64_t held = min64(chunk, tokens - low);
      Chunk c = {queries, weights, keys, a.key_scale.base ? scales : nullptr, scores,
                 held, heads, a.dim, tiles, count - tokens + low};
#pragma omp for schedule(static)
      for (int64_t row = 0; row < held; row++) {
        int64_t token = start + low + row;
        for (int64_t h = 0; h < heads; h++) {
          float* to = queries + (row * heads + h) * a.dim;
          weights[row * heads + h] = h < a.heads ? a.weights[token * a.heads + h] : 0.0f;
          if (h < a.heads)
            widen(to, a.query + token * a.query_token_stride + h * a.query_head_stride, a.dim,
                  (int)a.dtype, fp8);
          else
            memset(to, 0, (size_t)a.dim * 4);
        }
      }
      int64_t row_blocks = (held + QUERY_BLOCK - 1) / QUERY_BLOCK;
      int64_t key_blocks = (tiles + KEY_BLOCK - 1) / KEY_BLOCK;
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < row_blocks * key_blocks; task++)
        score_block(c, task / key_blocks, task % key_blocks);
#pragma omp for schedule(dynamic, 4)
      for (int64_t row = 0; row < held; row++) {
        uint32_t* mine = scratch + me * 2 * width;
        select_row(scores + row * width, c.past + row + 1, a.topk,
                   a.out + (start + low + row) * a.topk, mine, mine + width);
      }
    }
  }
  free(keys), free(scales), free(queries), free(weights), free(scores), free(rows), free(scratch);
  return failed;
}

}  // namespace

// Both return 0, or 1 where memory ran out.
extern "C" int ENTRY(lightning_indexer)(const IndexerArgs* a) {
  float fp8[256];
  fill_fp8(fp8);
  for (int64_t sequence = 0; sequence < a->sequences; sequence++)
    if (a->offsets[sequence + 1] > a->offsets[sequence] && index_sequence(*a, sequence, fp8))
      return 1;
  return 0;
}

extern "C" int ENTRY(select_topk)(const TopkArgs* a) {
  int threads = (int)a->threads;
  uint32_t* scratch = (uint32_t*)aligned(threads * 2 * (a->keys + 1) * 4);
  if (!scratch) return 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (int64_t row = 0; row < a->rows; row++) {
    uint32_t* mine = scratch + omp_get_thread_num() * 2 * (a->keys + 1);
    select_row((const float*)((const char*)a->scores + row * a->row_stride), a->keys, a->topk,
               a->out + row * a->topk, mine, mine + a->keys + 1);
  }
  free(scratch);
  return 0;
}
