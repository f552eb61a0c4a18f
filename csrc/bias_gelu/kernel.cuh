// gelu(z) = z * cdf(z), gelu'(z) = cdf(z) + z * density(z), z = x + bias, all in fp32. A block has kColumnThreads x 8 columns
// (blockIdx.y) and takes every gridDim.x-th row from blockIdx.x on.
#pragma once

#include "common/device.cuh"

namespace megabert {

template <class T>
__global__ void bias_gelu_forward(const T* x, const T* bias, T* y, int64_t rows, int64_t width, bool whole) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float b[kGroup];
  load_group(bias, column, width, whole, b);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float z[kGroup];
    load_group(x + row * width, column, width, whole, z);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      z[i] += b[i];
      z[i] *= normcdff(z[i]);
    }
    store_group(y + row * width, column, width, whole, z);
  }
}

// partial [gridDim.x, width]: the sums of dx over the block's rows.
template <class T>
__global__ void bias_gelu_gradient(const T* grad, const T* x, const T* bias, T* dx, float* partial, int64_t rows,
                                   int64_t width, bool whole) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float b[kGroup], sum[kGroup] = {};
  load_group(bias, column, width, whole, b);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float z[kGroup], d[kGroup];
    load_group(x + row * width, column, width, whole, z);
    load_group(grad + row * width, column, width, whole, d);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      z[i] += b[i];
      d[i] *= normcdff(z[i]) + z[i] * exp2f(z[i] * z[i] * (-0.5f * kLog2e)) * 0.398942280f;
      sum[i] += d[i];
    }
    store_group(dx + row * width, column, width, whole, d);
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    if (column + i < width) partial[blockIdx.x * width + column + i] = sum[i];
}

}  // namespace megabert
