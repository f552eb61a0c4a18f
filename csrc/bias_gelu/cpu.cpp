// GELU of x + bias over the last dimension, and its gradient with the bias's.

#include "bias_gelu/arguments.h"
#include "cast_transpose/arguments.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

template <class T>
void forward(const Tensor& x, const Tensor& bias, Tensor& y) {
  const int64_t width = bias.numel(), rows = width ? x.numel() / width : 0;
  const T *px = static_cast<const T*>(x.const_data_ptr()), *pb = static_cast<const T*>(bias.const_data_ptr());
  T* py = static_cast<T*>(y.mutable_data_ptr());
  const Kernels<T>& kernel = kernels<T>();
  torch::stable::parallel_for(0, rows, 1 + 32768 / (width + 1), [&](int64_t begin, int64_t end) {
    kernel.bias_gelu(px, pb, py, width, begin, end);
  });
}

template <class T>
void backward(const Tensor& grad, const Tensor& x, const Tensor& bias, Tensor& dx, Tensor& dbias) {
  const int64_t width = bias.numel();
  const RowBlocks blocks(width ? x.numel() / width : 0);
  const Kernels<T>& kernel = kernels<T>();
  const Tensor partial = torch::stable::new_empty(x, {blocks.count, width}, ScalarType::Float);
  float* sums = static_cast<float*>(partial.mutable_data_ptr());
  const T *pg = static_cast<const T*>(grad.const_data_ptr()), *px = static_cast<const T*>(x.const_data_ptr());
  const T* pb = static_cast<const T*>(bias.const_data_ptr());
  T *pdx = static_cast<T*>(dx.mutable_data_ptr()), *pdb = static_cast<T*>(dbias.mutable_data_ptr());
  torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      kernel.bias_gelu_backward(pg, px, pb, pdx, sums + b * width, width, blocks.begin(b), blocks.end(b));
  });
  kernel.reduce_blocks(sums, pdb, blocks.count, width, 0, width);
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  check_cpu("bias_gelu", "x", x);
  check_bias_gelu("bias_gelu", x, bias);
  const Tensor xc = dense(x), bc = dense(bias);
  Tensor y = torch::stable::new_empty(xc, shape_of(xc));
  if (xc.scalar_type() == ScalarType::BFloat16) forward<bf16>(xc, bc, y);
  else forward<float>(xc, bc, y);
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  check_cpu("bias_gelu_backward", "x", x);
  check_bias_gelu_backward("bias_gelu_backward", grad, x, bias);
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  Tensor dx = torch::stable::new_empty(xc, shape_of(xc)), dbias = torch::stable::new_empty(bc, shape_of(bc));
  if (xc.scalar_type() == ScalarType::BFloat16) backward<bf16>(gc, xc, bc, dx, dbias);
  else backward<float>(gc, xc, bc, dx, dbias);
  return {dx, dbias};
}

std::tuple<Tensor, Tensor, Tensor> bias_gelu_cast(const Tensor& x, const Tensor& bias, const Tensor& scale) {
  return cast_transpose_on_cpu(bias_gelu(x, bias), scale, false, true, true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bias_gelu_backward_cast(const Tensor& grad, const Tensor& x,
                                                                   const Tensor& bias, const Tensor& scale) {
  const auto [dx, dbias] = bias_gelu_backward(grad, x, bias);
  const auto [values, transposed, amax] = cast_transpose_on_cpu(dx, scale, true, true, true);
  return {values, transposed, amax, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("bias_gelu_cast", TORCH_BOX(&bias_gelu_cast));
  m.impl("bias_gelu_backward_cast", TORCH_BOX(&bias_gelu_backward_cast));
}

}  // namespace megabert
