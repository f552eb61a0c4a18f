// gelu(z) = z * cdf(z), gelu'(z) = cdf(z) + z * density(z), z = x + bias, all in fp32. A block has kColumnThreads x 8 columns
// (blockIdx.y) and takes every gridDim.x-th row from blockIdx.x on.
#pragma once

#include "common/device.cuh"

namespace megabert {

// Standard normal distribution: cdf(z), and density(z) * sqrt(2 pi) = exp(-z^2 / 2).
// cdf(-u) = exp(-u^2 / 2) * t * P(t), t = 1 / (1 + s u), for u >= 0: minimax fits. That for fp32 is the CPU's (cpu/simd.h), with
// a relative error of 3e-7; that for the two-byte types has 1.8e-5, where their rounding is 2.4e-4 or more.
struct Normal {
  float cdf, bell;
};
template <class T>
__device__ inline Normal normal(float z) {
  constexpr bool fine = sizeof(T) == 4;
  const float t = fast_reciprocal(fabsf(z) * (fine ? 0.26f : 0.325f) + 1.0f);
  float p;
  if constexpr (fine) {
    p = t * 0.030504941940307617f - 0.1528290957212448f;
    p = p * t + 0.25149184465408325f;
    p = p * t - 0.1509496122598648f;
    p = p * t + 0.16094829142093658f;
    p = p * t + 0.05102750286459923f;
    p = p * t + 0.10303030163049698f;
    p = p * t + 0.10301674157381058f;
    p = p * t + 0.10375905781984329f;
  } else {
    p = t * -0.0631787177f + 0.1213928476f;
    p = p * t + 0.0624746463f;
    p = p * t + 0.1202439247f;
    p = p * t + 0.1294055228f;
    p = p * t + 0.1296585589f;
  }
  const float bell = fast_exp2(z * z * (-0.5f * kLog2e));
  const float tail = bell * t * p;
  return {z < 0.0f ? tail : 1.0f - tail, bell};
}

// gelu(z), and its slope.
template <class T>
__device__ inline float gelu(float z) {
  return z * normal<T>(z).cdf;
}
template <class T>
__device__ inline float gelu_slope(float z) {
  const Normal law = normal<T>(z);
  return law.cdf + z * law.bell * 0.398942280f;
}

template <class T, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    bias_gelu_forward(const T* x, const T* bias, T* y, int64_t rows, int64_t width) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float b[kGroup];
  load<Whole>(bias, column, width, b);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float z[kGroup];
    load<Whole>(x + row * width, column, width, z);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] = gelu<T>(z[i] + b[i]);
    store<Whole>(y + row * width, column, width, z);
  }
}

// partial [gridDim.x, width]: the sums of dx over the block's rows.
template <class T, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    bias_gelu_gradient(const T* grad, const T* x, const T* bias, T* dx, float* partial, int64_t rows, int64_t width) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float b[kGroup], sum[kGroup] = {};
  load<Whole>(bias, column, width, b);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float z[kGroup], d[kGroup];
    load<Whole>(x + row * width, column, width, z);
    load<Whole>(grad + row * width, column, width, d);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      d[i] *= gelu_slope<T>(z[i] + b[i]);
      sum[i] += d[i];
    }
    store<Whole>(dx + row * width, column, width, d);
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    if (column + i < width) partial[blockIdx.x * width + column + i] = sum[i];
}

// Columns of x for one of the result, and the kernels, for who launches them.
struct GeluKernels {
  static constexpr int64_t inputs = 1;
  template <class T, bool Whole>
  static auto forward() {
    return bias_gelu_forward<T, Whole>;
  }
  template <class T, bool Whole>
  static auto gradient() {
    return bias_gelu_gradient<T, Whole>;
  }
};

// gelu(a) * b of (a, b) = x + bias: rows of x have 2 * width columns, blocks as above over the columns of the result.
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
