// Dropout over the last dimension's rows; blocks as in bias_gelu.
#pragma once

#include "common/device.cuh"

namespace megabert {

template <class T>
__global__ void dropout_forward(const T* x, T* y, Dropout dropout, const int64_t* seed, int64_t rows, int64_t width,
                                bool whole) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  dropout = with_seed(dropout, seed);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float value[kGroup], factor[kGroup];
    load_group(x + row * width, column, width, whole, value);
    dropout_factors(dropout, row, column / kGroup, factor);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) value[i] = factor[i] == 0.0f ? 0.0f : value[i] * factor[i];
    store_group(y + row * width, column, width, whole, value);
  }
}

}  // namespace megabert
