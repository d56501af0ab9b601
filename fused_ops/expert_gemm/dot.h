// sums[row][panel] += x . w over `length` columns of one group, exactly, in int32.
// x is [rows, stride] in the type that Tile names, w unsigned codes as gemm.h lays them out. Tile
// also says how many rows and panels fit the registers without spilling.
#pragma once
#include "csrc/vec.h"

#if defined(GLM5Q_AVX2) || defined(GLM5Q_AVX512)
#include <immintrin.h>
#endif

namespace {

template <int BITS>
struct Tile;

static inline int32_t four_bytes(const int8_t* x) {
  int32_t word;
  memcpy(&word, x, 4);
  return word;
}

#if defined(GLM5Q_AVX512)

template <int BITS>
struct Tile {
  typedef int8_t X;
  static constexpr int ROWS = 8, PANELS = 2;
};

// vpdpbusd: four unsigned x signed bytes a lane added to int32, no saturation.
template <int BITS, int ROWS, int PANELS>
static inline void group_dot(const int8_t* x, int64_t stride, const uint8_t* w, int64_t panel_bytes,
                             int64_t length, vi (*sums)[PANELS]) {
  constexpr int HALVES = BITS == 4 ? 2 : 1;
  const __m512i low = _mm512_set1_epi8(15);
  __m512i total[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < PANELS; c++) total[r][c] = (__m512i)sums[r][c];
  for (int64_t i = 0; i < length; i += 4 * HALVES, w += 64)
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      __m512i codes[PANELS];
      for (int c = 0; c < PANELS; c++) {
        codes[c] = _mm512_loadu_si512(w + c * panel_bytes);
        if (half) codes[c] = _mm512_srli_epi16(codes[c], 4);
        if (BITS == 4) codes[c] = _mm512_and_si512(codes[c], low);
      }
      for (int r = 0; r < ROWS; r++) {
        __m512i four = _mm512_set1_epi32(four_bytes(x + r * stride + i + 4 * half));
        for (int c = 0; c < PANELS; c++)
          total[r][c] = _mm512_dpbusd_epi32(total[r][c], codes[c], four);
      }
    }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < PANELS; c++) sums[r][c] = (vi)total[r][c];
}

#elif defined(GLM5Q_AVX2)

template <>
struct Tile<4> {
  typedef int8_t X;
  static constexpr int ROWS = 3, PANELS = 2;
};
template <>
struct Tile<8> {
  typedef int16_t X;
  static constexpr int ROWS = 4, PANELS = 1;
};

// Nibbles: vpmaddubsw sums two products, at most 2 x 15 x 128 = 3840, so eight fit 16 bits and are
// widened together. Bytes would overflow it: they are widened to 16 bits first, vpmaddwd.
template <int ROWS, int PANELS>
static inline void nibble_dot(const int8_t* x, int64_t stride, const uint8_t* w,
                              int64_t panel_bytes, int64_t length, vi (*sums)[PANELS]) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < length;) {
    int64_t end = min64(i + 32, length);
    __m256i narrow[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < PANELS; c++) narrow[r][c] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (; i < end; i += 8, w += 32) {
      __m256i even[PANELS], odd[PANELS];
      for (int c = 0; c < PANELS; c++) {
        even[c] = _mm256_loadu_si256((const __m256i*)(w + c * panel_bytes));
        odd[c] = _mm256_and_si256(_mm256_srli_epi16(even[c], 4), low);
        even[c] = _mm256_and_si256(even[c], low);
      }
      for (int r = 0; r < ROWS; r++) {
        const int8_t* from = x + r * stride + i;
        __m256i first = _mm256_set1_epi32(four_bytes(from));
        __m256i second = _mm256_set1_epi32(four_bytes(from + 4));
        for (int c = 0; c < PANELS; c++) {
          narrow[r][c] = _mm256_add_epi16(narrow[r][c], _mm256_maddubs_epi16(even[c], first));
          narrow[r][c] = _mm256_add_epi16(narrow[r][c], _mm256_maddubs_epi16(odd[c], second));
        }
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < PANELS; c++) sums[r][c] += (vi)_mm256_madd_epi16(narrow[r][c], ones);
  }
}

// Each 128-bit half holds four features x four columns; a lane sums a pair of its columns, and the
// pairs are added at the end: hadd works within halves, so features come out 0 1 4 5 2 3 6 7.
template <int ROWS, int PANELS>
static inline void byte_dot(const int16_t* x, int64_t stride, const uint8_t* w,
                            int64_t panel_bytes, int64_t length, vi (*sums)[PANELS]) {
  __m256i front[ROWS][PANELS], back[ROWS][PANELS];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < PANELS; c++) front[r][c] = back[r][c] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int64_t i = 0; i < length; i += 4, w += 32) {
    __m256i head[PANELS], tail[PANELS];
    for (int c = 0; c < PANELS; c++) {
      const __m128i* at = (const __m128i*)(w + c * panel_bytes);
      head[c] = _mm256_cvtepu8_epi16(_mm_loadu_si128(at));
      tail[c] = _mm256_cvtepu8_epi16(_mm_loadu_si128(at + 1));
    }
    for (int r = 0; r < ROWS; r++) {
      int64_t four;
      memcpy(&four, x + r * stride + i, 8);
      __m256i both = _mm256_set1_epi64x(four);
      for (int c = 0; c < PANELS; c++) {
        front[r][c] = _mm256_add_epi32(front[r][c], _mm256_madd_epi16(head[c], both));
        back[r][c] = _mm256_add_epi32(back[r][c], _mm256_madd_epi16(tail[c], both));
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < PANELS; c++) {
      __m256i mixed = _mm256_hadd_epi32(front[r][c], back[r][c]);
      sums[r][c] += (vi)_mm256_permute4x64_epi64(mixed, 0xD8);
    }
}

template <int BITS, int ROWS, int PANELS>
static inline void group_dot(const typename Tile<BITS>::X* x, int64_t stride, const uint8_t* w,
                             int64_t panel_bytes, int64_t length, vi (*sums)[PANELS]) {
  if constexpr (BITS == 4)
    nibble_dot<ROWS, PANELS>(x, stride, w, panel_bytes, length, sums);
  else
    byte_dot<ROWS, PANELS>(x, stride, w, panel_bytes, length, sums);
}

#else

template <int BITS>
struct Tile {
  typedef int8_t X;
  static constexpr int ROWS = 4, PANELS = 1;
};

// Through floats, as SSE2 has no int32 product (1.9 times faster at 256 rows): 512 products of at
// most 255 x 128 stay below 2^24, so exact, then are widened. Bytes of a word: little-endian.
template <int BITS, int ROWS, int PANELS>
static inline void group_dot(const int8_t* x, int64_t stride, const uint8_t* w, int64_t panel_bytes,
                             int64_t length, vi (*sums)[PANELS]) {
  constexpr int STEP = BITS == 4 ? 8 : 4;
  for (int64_t i = 0; i < length;) {
    int64_t end = min64(i + 512, length);
    vf narrow[ROWS][PANELS] = {};
    for (; i < end; i += STEP, w += 4 * LANES)
      for (int c = 0; c < PANELS; c++) {
        vi word = (vi)load((const float*)(w + c * panel_bytes));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          vf low = __builtin_convertvector((word >> (8 * j)) & (BITS == 4 ? 15 : 255), vf);
          vf high = __builtin_convertvector((word >> (8 * j + 4)) & 15, vf);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r++) {
            const int8_t* from = x + r * stride + i + j;
            narrow[r][c] += low * (float)from[0];
            if (BITS == 4) narrow[r][c] += high * (float)from[4];
          }
        }
      }
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < PANELS; c++)
        sums[r][c] += __builtin_convertvector(narrow[r][c], vi);
  }
}

#endif

}  // namespace
