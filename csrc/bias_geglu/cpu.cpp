// gelu(a) * b of (a, b) = x + bias over the last dimension's halves, and its gradient with the bias's.

#include "bias_geglu/arguments.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

template <class T>
void forward(const Tensor& x, const Tensor& bias, const Tensor& y) {
  const int64_t width = bias.numel() / 2, rows = width ? y.numel() / width : 0;
  const T *px = data<T>(x), *pb = data<T>(bias);
  T* py = out<T>(y);
  const Kernels<T>& kernel = kernels<T>();
  torch::stable::parallel_for(0, rows, 1 + 16384 / (width + 1), [&](int64_t begin, int64_t end) {
    kernel.bias_geglu(px, pb, py, width, begin, end);
  });
}

template <class T>
void backward(const Tensor& grad, const Tensor& x, const Tensor& bias, const Tensor& dx, const Tensor& dbias) {
  const int64_t columns = bias.numel(), width = columns / 2;
  const RowBlocks blocks(width ? grad.numel() / width : 0);
  const Kernels<T>& kernel = kernels<T>();
  const Tensor partial = torch::stable::new_empty(x, {blocks.count, columns}, ScalarType::Float);
  float* sums = out<float>(partial);
  const T *pg = data<T>(grad), *px = data<T>(x), *pb = data<T>(bias);
  T* pdx = out<T>(dx);
  torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      kernel.bias_geglu_backward(pg, px, pb, pdx, sums + b * columns, width, blocks.begin(b), blocks.end(b));
  });
  kernel.reduce_blocks(sums, out<T>(dbias), blocks.count, columns, 0, columns);
}

Tensor bias_geglu(const Tensor& x, const Tensor& bias) {
  check_cpu("bias_geglu", "x", x);
  check_bias_geglu("bias_geglu", x, bias);
  const Tensor xc = dense(x), bc = dense(bias);
  const Tensor y = torch::stable::new_empty(xc, half_of(xc));
  if (xc.scalar_type() == ScalarType::BFloat16) forward<bf16>(xc, bc, y);
  else forward<float>(xc, bc, y);
  return y;
}

std::tuple<Tensor, Tensor> bias_geglu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  check_cpu("bias_geglu_backward", "x", x);
  check_bias_geglu_backward("bias_geglu_backward", grad, x, bias);
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  const Tensor dx = torch::stable::new_empty(xc, shape_of(xc)), dbias = torch::stable::new_empty(bc, shape_of(bc));
  if (xc.scalar_type() == ScalarType::BFloat16) backward<bf16>(gc, xc, bc, dx, dbias);
  else backward<float>(gc, xc, bc, dx, dbias);
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_geglu", TORCH_BOX(&bias_geglu));
  m.impl("bias_geglu_backward", TORCH_BOX(&bias_geglu_backward));
}

}  // namespace megabert
