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

// The result of rows [width] of x, or, with a gate, of rows [2 * width] of (a, b): gelu(a) * b.
template <class T, bool Gate, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    activation_forward(const T* x, const T* bias, T* y, int64_t rows, int64_t width) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float p[kGroup], q[kGroup];
  load<Whole>(bias, column, width, p);
  if constexpr (Gate) load<Whole>(bias + width, column, width, q);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* value = x + (1 + Gate) * row * width;
    float a[kGroup], b[kGroup];
    load<Whole>(value, column, width, a);
    if constexpr (Gate) load<Whole>(value + width, column, width, b);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float z = a[i] + p[i];
      a[i] = z * normal<T>(z).cdf;
      if constexpr (Gate) a[i] *= b[i] + q[i];
    }
    store<Whole>(y + row * width, column, width, a);
  }
}

// partial [gridDim.x, columns of x]: the sums of dx over the block's rows.
template <class T, bool Gate, bool Whole>
__global__ void __launch_bounds__(kColumnThreads)
    activation_gradient(const T* grad, const T* x, const T* bias, T* dx, float* partial, int64_t rows, int64_t width) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float p[kGroup], q[kGroup], values[kGroup] = {}, gates[kGroup] = {};
  load<Whole>(bias, column, width, p);
  if constexpr (Gate) load<Whole>(bias + width, column, width, q);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t at = (1 + Gate) * row * width;
    float a[kGroup], b[kGroup], g[kGroup];
    load<Whole>(x + at, column, width, a);
    if constexpr (Gate) load<Whole>(x + at + width, column, width, b);
    load<Whole>(grad + row * width, column, width, g);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float z = a[i] + p[i];
      const Normal law = normal<T>(z);
      const float slope = law.cdf + z * law.bell * 0.398942280f;
      if constexpr (Gate) {
        a[i] = g[i] * (b[i] + q[i]) * slope;
        b[i] = g[i] * z * law.cdf;
        gates[i] += b[i];
      } else {
        a[i] = g[i] * slope;
      }
      values[i] += a[i];
    }
    store<Whole>(dx + at, column, width, a);
    if constexpr (Gate) store<Whole>(dx + at + width, column, width, b);
  }
  float* line = partial + (1 + Gate) * blockIdx.x * width;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (column + i >= width) break;
    line[column + i] = values[i];
    if constexpr (Gate) line[width + column + i] = gates[i];
  }
}

}  // namespace megabert
