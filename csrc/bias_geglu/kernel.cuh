// gelu(a) * b of (a, b) = x + bias, rows of 2 * width columns, all in fp32. Blocks as in bias_gelu, over the result's columns.
#pragma once

#include "bias_gelu/kernel.cuh"

namespace megabert {

template <class T, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    bias_geglu_forward(const T* x, const T* bias, T* y, int64_t rows, int64_t width) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float p[kGroup], q[kGroup];
  load<Whole>(bias, column, width, p);
  load<Whole>(bias + width, column, width, q);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float a[kGroup], b[kGroup];
    load<Whole>(x + 2 * row * width, column, width, a);
    load<Whole>(x + (2 * row + 1) * width, column, width, b);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) a[i] = gelu<T>(a[i] + p[i]) * (b[i] + q[i]);
    store<Whole>(y + row * width, column, width, a);
  }
}

// partial [gridDim.x, 2 * width]: the sums of dx over the block's rows.
template <class T, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    bias_geglu_gradient(const T* grad, const T* x, const T* bias, T* dx, float* partial, int64_t rows, int64_t width) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float p[kGroup], q[kGroup], values[kGroup] = {}, gates[kGroup] = {};
  load<Whole>(bias, column, width, p);
  load<Whole>(bias + width, column, width, q);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float a[kGroup], b[kGroup], g[kGroup];
    load<Whole>(x + 2 * row * width, column, width, a);
    load<Whole>(x + (2 * row + 1) * width, column, width, b);
    load<Whole>(grad + row * width, column, width, g);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float z = a[i] + p[i];
      const Normal law = normal<T>(z);
      a[i] = g[i] * (b[i] + q[i]) * (law.cdf + z * law.bell * 0.398942280f);
      b[i] = g[i] * z * law.cdf;
      values[i] += a[i];
      gates[i] += b[i];
    }
    store<Whole>(dx + 2 * row * width, column, width, a);
    store<Whole>(dx + (2 * row + 1) * width, column, width, b);
  }
  float* line = partial + 2 * blockIdx.x * width;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (column + i >= width) break;
    line[column + i] = values[i];
    line[width + column + i] = gates[i];
  }
}

// Columns of x for one of the result, and the kernels, for who launches them.
struct GegluKernels {
  static constexpr int64_t inputs = 2;
  template <class T, bool Whole>
  static auto forward() {
    return bias_geglu_forward<T, Whole>;
  }
  template <class T, bool Whole>
  static auto gradient() {
    return bias_geglu_gradient<T, Whole>;
  }
};

}  // namespace megabert
