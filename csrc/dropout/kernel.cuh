// Dropout over the last dimension's rows; blocks as in bias_gelu.
#pragma once

#include "common/device.cuh"

namespace megabert {

template <class T, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    dropout_forward(const T* x, T* y, Dropout dropout, const int64_t* seed, int64_t rows, int64_t width) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  dropout = with_seed(dropout, seed);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float value[kGroup];
    load<Whole>(x + row * width, column, width, value);
    drop(dropout, row, column / kGroup, value);
    store<Whole>(y + row * width, column, width, value);
  }
}

}  // namespace megabert
