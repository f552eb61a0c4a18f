// Queries and keys rotated: column i of a head with column i + half, by the angles of the row's token, in fp32; values are
// copied. A thread has 8 pairs of one head (kColumnThreads of them a block, blockIdx.y) and takes every gridDim.x-th row.
#pragma once

#include "common/device.cuh"

namespace megabert {

template <class T, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    rotate_heads(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t rows, int64_t heads, int64_t half) {
  const int64_t groups = (half + kGroup - 1) / kGroup;
  const int64_t task = static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x;
  const int64_t head = task / groups, column = task % groups * kGroup;
  if (head >= 3 * heads) return;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t at = (row * 3 * heads + head) * 2 * half;
    float a[kGroup], b[kGroup];
    load<Whole>(x + at, column, half, a);
    load<Whole>(x + at + half, column, half, b);
    if (head < 2 * heads) {
      float c[kGroup], s[kGroup];
      load<Whole>(cos + row * half, column, half, c);
      load<Whole>(sin + row * half, column, half, s);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float first = a[i];
        a[i] = first * c[i] - b[i] * s[i] * sign;
        b[i] = b[i] * c[i] + first * s[i] * sign;
      }
    }
    store<Whole>(y + at, column, half, a);
    store<Whole>(y + at + half, column, half, b);
  }
}

}  // namespace megabert
