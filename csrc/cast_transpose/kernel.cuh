// A matrix times a scale in FP8, row by row and column by column, and its largest magnitude, from one reading of it.
// A block takes a tile of 128 x 128: lines of 128 bytes in both results. A thread reads 4 rows of 8 columns at once, so that
// the 4 codes of a column are one word; words lie in shared memory where neither their writing (16 groups of columns, two
// groups of rows a warp) nor their reading (a column a warp) meets a bank twice.
#pragma once

#include "common/device.cuh"
#include "common/fp8.h"

namespace megabert {

constexpr int kTile = 128, kTileGroups = kTile / kGroup, kTileWords = kTile / 4;
constexpr int kCastThreads = 256;

// The codes of two floats, the first in the low byte.
template <class Format>
__device__ inline uint32_t code_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (Format::e5m2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return Format::code(first) | Format::code(second) << 8;
#endif
}

struct LargestOrNan {
  __device__ static float of(float a, float b) { return a > b || a != a ? a : b; }
};

// Where the codes of a matrix [rows, width] go.
struct Codes {
  const float* scale;
  uint8_t *values, *transposed;  // [rows, width] and [width, rows]; each may be null
  float* amax;                   // [gridDim.y, gridDim.x]: of each tile, NaN where there is one
  int64_t rows, width;
  bool whole, quads;  // all lines are whole groups; rows are a multiple of 4, so that four codes of a column are a word
};

// The first of the columns that a thread takes, of each row of a tile.
__device__ inline int64_t cast_column() {
  return static_cast<int64_t>(blockIdx.y) * kTile + threadIdx.x % kTileGroups * kGroup;
}

// The block's tile. `read(row, v)` gives the thread's 8 columns of a row; what is past the end is passed over.
template <class Format, class Read>
__device__ inline void cast_tile(const Codes& codes, Read read) {
  const auto [scale, values, transposed, amax, rows, width, whole, quads] = codes;
  __shared__ uint32_t turned[kTile * kTileWords];
  __shared__ float shared[kCastThreads / kWarp];
  const int group = threadIdx.x % kTileGroups;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTile, first_column = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t column = cast_column();
  const float factor = *scale;
  float largest = 0;
  for (int quad = threadIdx.x / kTileGroups; quad < kTileWords; quad += kCastThreads / kTileGroups) {
    uint32_t word[kGroup] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = first_row + quad * 4 + r;
      if (row >= rows || column >= width) continue;
      float v[kGroup];
      read(row, v);
      uint32_t pair[kGroup / 2];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) largest = LargestOrNan::of(v[i] < 0 ? -v[i] : v[i], largest);
#pragma unroll
      for (int i = 0; i < kGroup / 2; ++i) {
        pair[i] = code_pair<Format>(v[2 * i] * factor, v[2 * i + 1] * factor);
        word[2 * i] |= (pair[i] & 0xFFu) << (8 * r);
        word[2 * i + 1] |= pair[i] >> 8 << (8 * r);
      }
      if (!values) continue;
      uint8_t* to = values + row * width + column;
      if (whole) {
        const uint64_t low = pair[0] | pair[1] << 16, high = pair[2] | pair[3] << 16;
        *reinterpret_cast<uint64_t*>(to) = low | high << 32;
      } else {
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
          if (column + i < width) to[i] = static_cast<uint8_t>(pair[i / 2] >> (8 * (i % 2)));
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) turned[(group * kGroup + i) * kTileWords + (quad ^ 2 * group)] = word[i];
  }
  largest = reduce_row<LargestOrNan, kCastThreads>(largest, shared);  // its barriers come before `turned` is read, too
  if (threadIdx.x == 0) amax[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = largest;
  if (!transposed) return;
  const int quad = threadIdx.x % kWarp;
  const int64_t row = first_row + quad * 4;
  for (int c = threadIdx.x / kWarp; c < kTile && first_column + c < width; c += kCastThreads / kWarp) {
    const uint32_t word = turned[c * kTileWords + (quad ^ 2 * (c / kGroup))];
    uint8_t* to = transposed + (first_column + c) * rows + row;
    if (quads) {
      if (row < rows) *reinterpret_cast<uint32_t*>(to) = word;
    } else {
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (row + r < rows) to[r] = static_cast<uint8_t>(word >> (8 * r));
    }
  }
}

template <class T, class Format>
__global__ void __launch_bounds__(kCastThreads) cast_transpose_tile(const T* x, Codes codes) {
  cast_tile<Format>(codes, [&](int64_t row, float(&v)[kGroup]) {
    load_group(x + row * codes.width, cast_column(), codes.width, codes.whole, v);
  });
}

}  // namespace megabert
