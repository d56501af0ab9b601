/* What code from MLIR expects of its host: buffers, strided copies, float to bfloat16. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Buffers of a program, freed together after it: each begins with the one before. */
typedef struct Buffer {
  struct Buffer *before;
  char padding[56]; /* what follows stays on a cache line */
} Buffer;

static Buffer *newest;

void *glm5q_buffer(uint64_t bytes) {
  size_t whole = (sizeof(Buffer) + bytes + 63) / 64 * 64;
  Buffer *buffer = aligned_alloc(64, whole);
  if (!buffer) abort();
  buffer->before = newest;
  newest = buffer;
  return buffer + 1;
}

void glm5q_release(void) {
  while (newest) {
    Buffer *before = newest->before;
    free(newest);
    newest = before;
  }
}

/* MLIR's unranked memref: a rank, and a descriptor {allocated, aligned, offset, sizes, strides}. */
typedef struct {
  int64_t rank;
  int64_t *descriptor;
} Unranked;

static void copy(char *to, const char *from, const int64_t *sizes, const int64_t *to_strides,
                 const int64_t *from_strides, int64_t rank, int64_t bytes) {
  if (rank == 0) {
    memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i < sizes[0]; i++)
    copy(to + i * to_strides[0] * bytes, from + i * from_strides[0] * bytes, sizes + 1,
         to_strides + 1, from_strides + 1, rank - 1, bytes);
}

void memrefCopy(int64_t bytes, Unranked *from, Unranked *to) {
  int64_t rank = from->rank, *f = from->descriptor, *t = to->descriptor;
  copy((char *)t[1] + t[2] * bytes, (const char *)f[1] + f[2] * bytes, f + 3, t + 3 + rank,
       f + 3 + rank, rank, bytes);
}

/* Round to nearest even; the low half of a float's return register holds the bfloat16. */
_Float16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  int nan = (bits & 0x7fffffff) > 0x7f800000;
  uint16_t high = (nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  _Float16 result;
  memcpy(&result, &high, 2);
  return result;
}
