// Arguments of the kernels of dropout_add_layer_norm: plain data, for the CPU and for CUDA.
#pragma once

#include <cstdint>

namespace megabert {

template <class T>
struct LayerNormRows {
  const T *x, *bias, *residual, *weight, *shift;
  T *y, *z;
  float *mean, *rstd;
  int64_t rows, width;
  float eps;
};

template <class T>
struct LayerNormGradientRows {
  const T *grad, *second, *z, *weight;  // second may be null: another gradient of y, or (of_z) the gradient of z
  bool of_z;
  const float *mean, *rstd;
  T *dx, *dresidual;  // dx may be null: without dropout it is dresidual
  float* partial;     // CUDA only: [gridDim.x, 3, width], sums of dbias, dweight, dshift over the block's rows
  int64_t rows, width;
};

}  // namespace megabert
