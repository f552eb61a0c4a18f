// bias_gelu and its gradient for FP8 products, which alone read them: rounded to T as if they had been in memory, then in FP8
// row by row and column by column. A block has a tile of cast_transpose.
#pragma once

#include "bias_gelu/kernel.cuh"
#include "cast_transpose/kernel.cuh"

namespace megabert {

template <class T>
__global__ void __launch_bounds__(kCastThreads) bias_gelu_codes(const T* x, const T* bias, Codes codes) {
  const int64_t column = cast_column(), width = codes.width;
  float b[kGroup];
  load_group(bias, column, width, codes.whole, b);
  cast_tile<E4M3>(codes, [&](int64_t row, float(&v)[kGroup]) {
    load_group(x + row * width, column, width, codes.whole, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = rounded<T>(gelu<T>(v[i] + b[i]));
  });
}

// partial [gridDim.x, width]: the sums of dx over a tile's rows, before it is rounded.
template <class T>
__global__ void __launch_bounds__(kCastThreads)
    bias_gelu_gradient_codes(const T* grad, const T* x, const T* bias, Codes codes, float* partial) {
  __shared__ float sums[kCastThreads / kTileGroups][kTile];
  const int64_t column = cast_column(), width = codes.width;
  float b[kGroup], sum[kGroup] = {};
  load_group(bias, column, width, codes.whole, b);
  cast_tile<E5M2>(codes, [&](int64_t row, float(&v)[kGroup]) {
    float z[kGroup];
    load_group(x + row * width, column, width, codes.whole, z);
    load_group(grad + row * width, column, width, codes.whole, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      v[i] *= gelu_slope<T>(z[i] + b[i]);
      sum[i] += v[i];
      v[i] = rounded<T>(v[i]);
    }
  });
#pragma unroll
  for (int i = 0; i < kGroup; ++i) sums[threadIdx.x / kTileGroups][threadIdx.x % kTileGroups * kGroup + i] = sum[i];
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTile;
  for (int c = threadIdx.x; c < kTile && first + c < width; c += kCastThreads) {
    float total = 0;
#pragma unroll
    for (int line = 0; line < kCastThreads / kTileGroups; ++line) total += sums[line][c];
    partial[blockIdx.x * width + first + c] = total;
  }
}

}  // namespace megabert
