// GELU of x + bias over the last dimension on the GPU, with a gate (bias_geglu) gelu(a) * b of its halves, and the gradients with
// the bias's.

#include "common/cuda.h"

#include "bias_gelu/arguments.h"
#include "bias_gelu/kernel.cuh"
#include "common/rows.h"

namespace megabert {
namespace {

template <bool Gate>
Tensor activate(const Tensor& x, const Tensor& bias) {
  constexpr const char* op = Gate ? "bias_geglu" : "bias_gelu";
  check_cuda(op, "x", x);
  check_activation(op, x, bias, kInputs<Gate>);
  const OnDevice device(x);
  const Tensor xc = dense(x), bc = dense(bias);
  const Tensor y = torch::stable::new_empty(xc, activated(xc, kInputs<Gate>));
  if (!y.numel()) return y;
  const int64_t width = bc.numel() / kInputs<Gate>, rows = y.numel() / width;
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *px = data<T>(xc), *pb = data<T>(bc);
    T* py = out<T>(y);
    with_bool(whole_groups(width, px, pb, py), [&](auto whole) {
      const auto kernel = activation_forward<T, Gate, decltype(whole)::value>;
      kernel<<<resident_column_grid(kernel, rows, width), kColumnThreads, 0, device.stream>>>(px, pb, py, rows, width);
      check_launch(op);
    });
  });
  return y;
}

// -> dx, dbias
template <bool Gate>
std::tuple<Tensor, Tensor> gradient(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  constexpr const char* op = Gate ? "bias_geglu_backward" : "bias_gelu_backward";
  check_cuda(op, "x", x);
  check_activation_backward(op, grad, x, bias, kInputs<Gate>);
  const OnDevice device(x);
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  Tensor dx = torch::stable::empty_like(xc), dbias = torch::stable::empty_like(bc);
  const int64_t columns = bc.numel(), width = columns / kInputs<Gate>, rows = columns ? xc.numel() / columns : 0;
  if (!rows) {
    torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *pg = data<T>(gc), *px = data<T>(xc), *pb = data<T>(bc);
    T* pd = out<T>(dx);
    with_bool(whole_groups(width, pg, px, pb, pd), [&](auto whole) {
      const auto kernel = activation_gradient<T, Gate, decltype(whole)::value>;
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
  m.impl("bias_gelu", TORCH_BOX(&activate<false>));
  m.impl("bias_gelu_backward", TORCH_BOX(&gradient<false>));
  m.impl("bias_geglu", TORCH_BOX(&activate<true>));
  m.impl("bias_geglu_backward", TORCH_BOX(&gradient<true>));
}

}  // namespace megabert
