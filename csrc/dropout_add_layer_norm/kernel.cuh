// z = residual + dropout(x + bias), rounded to the tensor's type before the norm, so that forward and backward (which reads
// the stored z) are of the same function. Statistics are fp32, of the row in registers.
#pragma once

#include "common/device.cuh"
#include "common/rows.h"
#include "dropout_add_layer_norm/arguments.h"

namespace megabert {

// Dropout over the last dimension's rows; blocks as in bias_gelu.
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

// One row by Threads threads, 8 * Groups columns each, of which this is `thread`; z becomes y, not yet rounded to T.
template <class T, int Threads, int Groups, bool Whole>
__device__ inline void norm_row(const LayerNormRows<T>& a, const Dropout& dropout, int64_t row, int thread, float* shared,
                                float (&z)[Groups][kGroup]) {
  const float inverse = 1.0f / static_cast<float>(a.width);
  float sum = 0;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (thread + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column >= a.width) continue;
    float bias[kGroup], residual[kGroup];
    load<Whole>(a.x + row * a.width, column, a.width, z[g]);
    load<Whole>(a.bias, column, a.width, bias);
    load<Whole>(a.residual + row * a.width, column, a.width, residual);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[g][i] += bias[i];
    if (dropout.threshold) drop(dropout, row, column / kGroup, z[g]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      z[g][i] = rounded<T>(residual[i] + z[g][i]);
      sum += z[g][i];  // columns past the end are zero
    }
    store<Whole>(a.z + row * a.width, column, a.width, z[g]);
  }
  const float mean = reduce_row<Sum, Threads>(sum, shared) * inverse;
  float square = 0;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (thread + static_cast<int64_t>(g) * Threads) * kGroup;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (column + (Whole ? 0 : i) < a.width) square += (z[g][i] - mean) * (z[g][i] - mean);
  }
  const float rstd = rsqrtf(reduce_row<Sum, Threads>(square, shared) * inverse + a.eps);
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (thread + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column >= a.width) continue;
    float weight[kGroup], shift[kGroup];
    load<Whole>(a.weight, column, a.width, weight);
    load<Whole>(a.shift, column, a.width, shift);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[g][i] = (z[g][i] - mean) * rstd * weight[i] + shift[i];
    store<Whole>(a.y + row * a.width, column, a.width, z[g]);
  }
  if (thread == 0) a.mean[row] = mean, a.rstd[row] = rstd;
}

// Threads x 8 * Groups >= width. blockDim = (Threads, rows of a block); more than a warp: one row.
template <class T, int Threads, int Groups, bool Whole>
__global__ void __launch_bounds__(RowShape<Threads, Groups>::block, 768 / RowShape<Threads, Groups>::block)
    layer_norm_forward(LayerNormRows<T> a, Dropout dropout, const int64_t* seed) {
  __shared__ float shared[Threads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  float y[Groups][kGroup];
  norm_row<T, Threads, Groups, Whole>(a, with_seed(dropout, seed), row, threadIdx.x, shared, y);
}

// Two sums over the Threads threads of a row with one barrier. `shared` has a pair for each warp; the next row needs another.
template <int Threads>
__device__ inline void sum_row(float& a, float& b, float2* shared) {
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) {
    a += __shfl_xor_sync(kAllLanes, a, distance);
    b += __shfl_xor_sync(kAllLanes, b, distance);
  }
  if constexpr (Threads > kWarp) {
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = make_float2(a, b);
    __syncthreads();
    a = b = 0;
#pragma unroll
    for (int warp = 0; warp < Threads / kWarp; ++warp) a += shared[warp].x, b += shared[warp].y;
  }
}

// With xhat = (z - mean) * rstd and g = grad * weight:
//   dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) + gradient of z; dresidual = dz; dx = dropout'(dz).
// blockDim = Threads; a block takes every gridDim.x-th row. With one group a thread, the next row is loaded while one is
// computed; with two there are not enough registers for this and for all sums: those of dbias are in shared memory, separately for
// each thread.
template <class T, int Threads, int Groups, bool Whole>
__global__ void __launch_bounds__(Threads)
    layer_norm_gradient(LayerNormGradientRows<T> a, Dropout dropout, const int64_t* seed) {
  constexpr bool ahead = Groups == 1;
  __shared__ float2 shared[2][Threads / kWarp];
  __shared__ float dbias_beside[ahead ? 1 : Groups * kGroup][ahead ? 1 : Threads];
  dropout = with_seed(dropout, seed);
  const float inverse = 1.0f / static_cast<float>(a.width);
  const auto column_of = [](int k) { return (threadIdx.x + static_cast<int64_t>(k) * Threads) * kGroup; };
  float dbias[kGroup] = {}, dweight[Groups][kGroup] = {}, dshift[Groups][kGroup] = {};
  Group<T> weight[Groups], grad[Groups], z[Groups], second[Groups];
  float mean = 0, rstd = 0;
  const auto read = [&](int64_t row, int k) {
    grad[k] = fetch<Whole>(a.grad + row * a.width, column_of(k), a.width);
    z[k] = fetch<Whole>(a.z + row * a.width, column_of(k), a.width);
    if (ahead && a.second) second[k] = fetch<Whole>(a.second + row * a.width, column_of(k), a.width);
  };
  if constexpr (ahead) {
    weight[0] = fetch<Whole>(a.weight, column_of(0), a.width);
    if (blockIdx.x < a.rows) mean = a.mean[blockIdx.x], rstd = a.rstd[blockIdx.x], read(blockIdx.x, 0);
  } else {
    for (int i = 0; i < Groups * kGroup; ++i) dbias_beside[i][threadIdx.x] = 0;
  }
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float centre = ahead ? mean : a.mean[row], scale = ahead ? rstd : a.rstd[row];
    float g[Groups][kGroup], xhat[Groups][kGroup], sum_g = 0, sum_gx = 0;
    Group<T> of_z[Groups];
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
      if constexpr (!ahead) {
        read(row, k);
        weight[k] = fetch<Whole>(a.weight, column_of(k), a.width);
      }
      float w[kGroup];
      unpack(grad[k], g[k]), unpack(z[k], xhat[k]), unpack(weight[k], w);
      if constexpr (ahead) of_z[k] = second[k];
      if (a.second && !a.of_z) {
        float more[kGroup];
        if constexpr (!ahead) second[k] = fetch<Whole>(a.second + row * a.width, column_of(k), a.width);
        unpack(second[k], more);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) g[k][i] += more[i];
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {  // g is zero past the end
        xhat[k][i] = (xhat[k][i] - centre) * scale;
        dweight[k][i] += g[k][i] * xhat[k][i];
        dshift[k][i] += g[k][i];
        g[k][i] *= w[i];
        sum_g += g[k][i];
        sum_gx += g[k][i] * xhat[k][i];
      }
    }
    if (const int64_t next = row + gridDim.x; ahead && next < a.rows) mean = a.mean[next], rstd = a.rstd[next], read(next, 0);
    sum_row<Threads>(sum_g, sum_gx, shared[turn ^= 1]);
    const float mean_g = sum_g * inverse, mean_gx = sum_gx * inverse;
#pragma unroll
    for (int k = 0; k < Groups; ++k) {
      float dz[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) dz[i] = (g[k][i] - mean_g - xhat[k][i] * mean_gx) * scale;
      if (a.second && a.of_z) {
        float more[kGroup];
        if constexpr (!ahead) of_z[k] = fetch<Whole>(a.second + row * a.width, column_of(k), a.width);
        unpack(of_z[k], more);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) dz[i] += more[i];
      }
      store<Whole>(a.dresidual + row * a.width, column_of(k), a.width, dz);
      if (dropout.threshold) {
        drop(dropout, row, column_of(k) / kGroup, dz);
        store<Whole>(a.dx + row * a.width, column_of(k), a.width, dz);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if constexpr (ahead) dbias[i] += dz[i];
        else dbias_beside[k * kGroup + i][threadIdx.x] += dz[i];
      }
    }
  }
  float* line = a.partial + blockIdx.x * 3 * a.width;
#pragma unroll
  for (int k = 0; k < Groups; ++k) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int64_t column = column_of(k) + i;
      if (column >= a.width) continue;
      if constexpr (ahead) line[column] = dbias[i];
      else line[column] = dbias_beside[k * kGroup + i][threadIdx.x];
      line[a.width + column] = dweight[k][i];
      line[2 * a.width + column] = dshift[k][i];
    }
  }
}

}  // namespace megabert
