// dropout_add_layer_norm for a result that an FP8 product reads, too: besides y as it is, y as it was stored in E4M3, row by row
// and column by column. Rows of at most 1,024 columns in whole groups, 16 rows or a multiple.
#pragma once

#include "cast_transpose/kernel.cuh"
#include "dropout_add_layer_norm/kernel.cuh"

namespace megabert {

constexpr int kCodeRows = 32, kCodeWarps = 8;  // of a block
constexpr int64_t kMaxCodeColumns = 1024;

// A warp takes four rows, one after another. Their codes lie in shared memory, so that each column of the block's is written
// 16 bytes at a time.
template <class T, int Groups>
__global__ void __launch_bounds__(kCodeWarps* kWarp, 2)
    layer_norm_codes(LayerNormRows<T> a, Dropout dropout, const int64_t* seed, Codes codes) {
  __shared__ uint32_t lines[kCodeRows][Groups * kWarp * kGroup / 4];  // four columns a word
  __shared__ float shared[kCodeWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCodeRows;
  dropout = with_seed(dropout, seed);
  const float factor = *codes.scale;
  float largest = 0;
#pragma unroll 1
  for (int line = warp * 4; line < warp * 4 + 4 && first + line < a.rows; ++line) {
    const int64_t row = first + line;
    float y[Groups][kGroup];
    norm_row<T, kWarp, Groups, true>(a, dropout, row, lane, shared, y);
#pragma unroll
    for (int g = 0; g < Groups; ++g) {
      const int group = lane + g * kWarp, column = group * kGroup;
      if (column >= a.width) continue;
      uint32_t pair[kGroup / 2];
#pragma unroll
      for (int i = 0; i < kGroup / 2; ++i) {
        const float left = rounded<T>(y[g][2 * i]), right = rounded<T>(y[g][2 * i + 1]);
        largest = LargestOrNan::of(fabsf(left), LargestOrNan::of(fabsf(right), largest));
        pair[i] = code_pair<E4M3>(left * factor, right * factor);
      }
      const uint32_t low = pair[0] | pair[1] << 16, high = pair[2] | pair[3] << 16;
      lines[line][2 * group] = low, lines[line][2 * group + 1] = high;
      *reinterpret_cast<uint64_t*>(codes.values + row * a.width + column) = low | static_cast<uint64_t>(high) << 32;
    }
  }
  largest = reduce_row<LargestOrNan, kCodeWarps * kWarp>(largest, shared);  // its barriers come before `lines` is read, too
  if (threadIdx.x == 0) codes.amax[blockIdx.x] = largest;
  for (int quad = threadIdx.x; quad * 4 < a.width; quad += kCodeWarps * kWarp) {
    for (int half = 0; half < kCodeRows && first + half < a.rows; half += 16) {
      uint4 of_column[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        uint32_t word[4] = {};
#pragma unroll
        for (int r = 0; r < 16; ++r) word[r / 4] |= (lines[half + r][quad] >> (8 * c) & 0xFFu) << (8 * (r % 4));
        of_column[c].x = word[0], of_column[c].y = word[1], of_column[c].z = word[2], of_column[c].w = word[3];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *reinterpret_cast<uint4*>(codes.transposed + (quad * 4 + c) * a.rows + first + half) = of_column[c];
    }
  }
}

}  // namespace megabert
