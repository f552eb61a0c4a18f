// gelu(a) * b of (a, b) = x + bias over the last dimension's halves on the GPU, and its gradient with the bias's.

#include "common/cuda.h"

#include "bias_geglu/arguments.h"
#include "bias_geglu/kernel.cuh"
#include "common/rows.h"

namespace megabert {
namespace {

Tensor bias_geglu(const Tensor& x, const Tensor& bias) {
  constexpr const char* op = "bias_geglu";
  check_cuda(op, "x", x);
  check_bias_geglu(op, x, bias);
  const OnDevice device(x);
  const Tensor xc = dense(x), bc = dense(bias);
  const Tensor y = torch::stable::new_empty(xc, half_of(xc));
  if (!y.numel()) return y;
  const int64_t width = bc.numel() / 2, rows = y.numel() / width;
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *px = data<T>(xc), *pb = data<T>(bc);
    T* py = out<T>(y);
    with_bool(whole_groups(width, px, pb, py), [&](auto whole) {
      const auto kernel = bias_geglu_forward<T, decltype(whole)::value>;
      kernel<<<resident_column_grid(kernel, rows, width), kColumnThreads, 0, device.stream>>>(px, pb, py, rows, width);
      check_launch(op);
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_geglu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  constexpr const char* op = "bias_geglu_backward";
  check_cuda(op, "x", x);
  check_bias_geglu_backward(op, grad, x, bias);
  const OnDevice device(x);
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  Tensor dx = torch::stable::new_empty(xc, shape_of(xc)), dbias = torch::stable::new_empty(bc, shape_of(bc));
  const int64_t columns = bc.numel(), width = columns / 2, rows = width ? gc.numel() / width : 0;
  if (!rows) {
    torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *pg = data<T>(gc), *px = data<T>(xc), *pb = data<T>(bc);
    T* pd = out<T>(dx);
    with_bool(whole_groups(width, pg, px, pb, pd), [&](auto whole) {
      const auto kernel = bias_geglu_gradient<T, decltype(whole)::value>;
      const dim3 grid = resident_column_grid(kernel, rows, width);
      const Tensor partial = torch::stable::new_empty(xc, {grid.x, columns}, ScalarType::Float);
      kernel<<<grid, kColumnThreads, 0, device.stream>>>(pg, px, pb, pd, out<float>(partial), rows, width);
      check_launch(op);
      reduce_lines_on(device.stream, data<float>(partial), out<T>(dbias), grid.x, columns, columns, op);
    });
  });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("bias_geglu", TORCH_BOX(&bias_geglu));
  m.impl("bias_geglu_backward", TORCH_BOX(&bias_geglu_backward));
}

}  // namespace megabert
