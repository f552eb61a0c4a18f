// z = residual + dropout(x + bias), rounded to the tensor's type before the norm, so that forward and backward (which reads
// the stored z) speak of the same function. Statistics are fp32, of the row in registers.
#pragma once

#include "common/device.cuh"

namespace megabert {

template <class T>
struct LayerNormRows {
  const T *x, *bias, *residual, *weight, *shift;
  T *y, *z;
  float *mean, *rstd;
  int64_t rows, width;
  float eps;
  bool whole;
};

// Threads x 8 * Groups >= width. blockDim = (Threads, rows of a block); more than a warp: one row.
template <class T, int Threads, int Groups>
__global__ void layer_norm_forward(LayerNormRows<T> a, Dropout dropout, const int64_t* seed) {
  __shared__ float shared[Threads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  dropout = with_seed(dropout, seed);
  const float inverse = 1.0f / static_cast<float>(a.width);
  float z[Groups][kGroup];
  float sum = 0;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column >= a.width) continue;
    float bias[kGroup], residual[kGroup];
    load_group(a.x + row * a.width, column, a.width, a.whole, z[g]);
    load_group(a.bias, column, a.width, a.whole, bias);
    load_group(a.residual + row * a.width, column, a.width, a.whole, residual);
    float factor[kGroup];
    if (dropout.threshold) dropout_factors(dropout, row, column / kGroup, factor);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float branch = z[g][i] + bias[i];
      if (dropout.threshold) branch = factor[i] == 0.0f ? 0.0f : branch * factor[i];
      z[g][i] = rounded<T>(residual[i] + branch);
      sum += z[g][i];  // columns past the end are zero
    }
    store_group(a.z + row * a.width, column, a.width, a.whole, z[g]);
  }
  const float mean = reduce_row<Sum, Threads>(sum, shared) * inverse;
  float square = 0;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(g) * Threads) * kGroup;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (column + i < a.width) square += (z[g][i] - mean) * (z[g][i] - mean);
  }
  const float rstd = rsqrtf(reduce_row<Sum, Threads>(square, shared) * inverse + a.eps);
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column >= a.width) continue;
    float weight[kGroup], shift[kGroup];
    load_group(a.weight, column, a.width, a.whole, weight);
    load_group(a.shift, column, a.width, a.whole, shift);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[g][i] = (z[g][i] - mean) * rstd * weight[i] + shift[i];
    store_group(a.y + row * a.width, column, a.width, a.whole, z[g]);
  }
  if (threadIdx.x == 0) a.mean[row] = mean, a.rstd[row] = rstd;
}

template <class T>
struct LayerNormGradientRows {
  const T *grad, *grad_z, *z, *weight;  // grad_z may be null
  const float *mean, *rstd;
  T *dx, *dresidual;  // dx may be null: without dropout it is dresidual
  float* partial;     // [gridDim.x, 3, width]: sums of dbias, dweight, dshift over the block's rows
  int64_t rows, width;
  bool whole;
};

// With xhat = (z - mean) * rstd and g = grad * weight:
//   dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) + grad_z; dresidual = dz; dx = dropout'(dz).
// blockDim = Threads; a block takes every gridDim.x-th row.
template <class T, int Threads, int Groups>
__global__ void layer_norm_gradient(LayerNormGradientRows<T> a, Dropout dropout, const int64_t* seed) {
  __shared__ float shared[Threads / kWarp];
  dropout = with_seed(dropout, seed);
  const float inverse = 1.0f / static_cast<float>(a.width);
  float dbias[Groups][kGroup] = {}, dweight[Groups][kGroup] = {}, dshift[Groups][kGroup] = {};
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float mean = a.mean[row], rstd = a.rstd[row];
    float g[Groups][kGroup], xhat[Groups][kGroup];
    float sum_g = 0, sum_gx = 0;
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
      const int64_t column = (threadIdx.x + static_cast<int64_t>(k) * Threads) * kGroup;
      if (column >= a.width) continue;
      float weight[kGroup];
      load_group(a.grad + row * a.width, column, a.width, a.whole, g[k]);
      load_group(a.z + row * a.width, column, a.width, a.whole, xhat[k]);
      load_group(a.weight, column, a.width, a.whole, weight);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        xhat[k][i] = (xhat[k][i] - mean) * rstd;
        dweight[k][i] += g[k][i] * xhat[k][i];
        dshift[k][i] += g[k][i];
        g[k][i] *= weight[i];  // zero past the end
        sum_g += g[k][i];
        sum_gx += g[k][i] * xhat[k][i];
      }
    }
    const float mean_g = reduce_row<Sum, Threads>(sum_g, shared) * inverse;
    const float mean_gx = reduce_row<Sum, Threads>(sum_gx, shared) * inverse;
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
      const int64_t column = (threadIdx.x + static_cast<int64_t>(k) * Threads) * kGroup;
      if (column >= a.width) continue;
      float dz[kGroup], more[kGroup], factor[kGroup];
      if (a.grad_z) load_group(a.grad_z + row * a.width, column, a.width, a.whole, more);
      if (dropout.threshold) dropout_factors(dropout, row, column / kGroup, factor);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        dz[i] = (g[k][i] - mean_g - xhat[k][i] * mean_gx) * rstd;
        if (a.grad_z) dz[i] += more[i];
      }
      store_group(a.dresidual + row * a.width, column, a.width, a.whole, dz);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (dropout.threshold) dz[i] = factor[i] == 0.0f ? 0.0f : dz[i] * factor[i];
        dbias[k][i] += dz[i];
      }
      if (a.dx) store_group(a.dx + row * a.width, column, a.width, a.whole, dz);
    }
  }
  float* line = a.partial + blockIdx.x * 3 * a.width;
#pragma unroll
  for (int k = 0; k < Groups; ++k) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(k) * Threads) * kGroup;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (column + i >= a.width) continue;
      line[column + i] = dbias[k][i];
      line[a.width + column + i] = dweight[k][i];
      line[2 * a.width + column + i] = dshift[k][i];
    }
  }
}

}  // namespace megabert
