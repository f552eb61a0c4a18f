// GELU of x + bias over the last dimension on the GPU, and its gradient with the bias's.

#include "bias_gelu/arguments.h"
#include "bias_gelu/cast.cuh"
#include "cast_transpose/launch.h"
#include "common/rows.h"

namespace megabert {
namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  constexpr const char* op = "bias_gelu";
  check_cuda(op, "x", x);
  check_bias_gelu(op, x, bias);
  const OnDevice device(x);
  const Tensor xc = dense(x), bc = dense(bias);
  Tensor y = torch::stable::new_empty(xc, shape_of(xc));
  if (!xc.numel()) return y;
  const int64_t width = bc.numel(), rows = xc.numel() / width;
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *px = data<T>(xc), *pb = data<T>(bc);
    T* py = out<T>(y);
    with_bool(whole_groups(width, px, pb, py), [&](auto whole) {
      const auto kernel = bias_gelu_forward<T, decltype(whole)::value>;
      kernel<<<resident_column_grid(kernel, rows, width), kColumnThreads, 0, device.stream>>>(px, pb, py, rows, width);
      check_launch(op);
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  constexpr const char* op = "bias_gelu_backward";
  check_cuda(op, "x", x);
  check_bias_gelu_backward(op, grad, x, bias);
  const OnDevice device(x);
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  Tensor dx = torch::stable::new_empty(xc, shape_of(xc)), dbias = torch::stable::new_empty(bc, shape_of(bc));
  const int64_t width = bc.numel(), rows = width ? xc.numel() / width : 0;
  if (!rows) {
    torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *pg = data<T>(gc), *px = data<T>(xc), *pb = data<T>(bc);
    T* pd = out<T>(dx);
    with_bool(whole_groups(width, pg, px, pb, pd), [&](auto whole) {
      const auto kernel = bias_gelu_gradient<T, decltype(whole)::value>;
      const dim3 grid = resident_column_grid(kernel, rows, width);
      const Tensor partial = torch::stable::new_empty(xc, {grid.x, width}, ScalarType::Float);
      kernel<<<grid, kColumnThreads, 0, device.stream>>>(pg, px, pb, pd, out<float>(partial), rows, width);
      check_launch(op);
      reduce_lines_on(device.stream, data<float>(partial), out<T>(dbias), grid.x, width, width, op);
    });
  });
  return {dx, dbias};
}

std::tuple<Tensor, Tensor, Tensor> bias_gelu_cast(const Tensor& x, const Tensor& bias, const Tensor& scale) {
  constexpr const char* op = "bias_gelu_cast";
  check_cuda(op, "x", x);
  check_bias_gelu(op, x, bias);
  const OnDevice device(x);
  Casts a(op, x, scale, false, true, true);
  const Tensor bc = dense(bias);
  const dim3 grid = cast_grid(a);
  const Tensor amax = torch::stable::new_empty(a.x, {static_cast<int64_t>(grid.x) * grid.y}, ScalarType::Float);
  if (!a.x.numel()) return {a.values, a.transposed, amax};
  with_type(a.x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *px = data<T>(a.x), *pb = data<T>(bc);
    bias_gelu_codes<T><<<grid, kCastThreads, 0, device.stream>>>(px, pb, codes_of(a, scale, amax, px, pb));
    check_launch(op);
  });
  return {a.values, a.transposed, amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bias_gelu_backward_cast(const Tensor& grad, const Tensor& x,
                                                                   const Tensor& bias, const Tensor& scale) {
  constexpr const char* op = "bias_gelu_backward_cast";
  check_cuda(op, "x", x);
  check_bias_gelu_backward(op, grad, x, bias);
  const OnDevice device(x);
  Casts a(op, x, scale, true, true, true);
  const Tensor gc = dense(grad), bc = dense(bias);
  Tensor dbias = torch::stable::new_empty(bc, shape_of(bc));
  const dim3 grid = cast_grid(a);
  const Tensor amax = torch::stable::new_empty(a.x, {static_cast<int64_t>(grid.x) * grid.y}, ScalarType::Float);
  if (!a.x.numel()) {
    torch::stable::zero_(dbias);
    return {a.values, a.transposed, amax, dbias};
  }
  const Tensor partial = torch::stable::new_empty(a.x, {grid.x, a.width}, ScalarType::Float);
  with_type(a.x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *pg = data<T>(gc), *px = data<T>(a.x), *pb = data<T>(bc);
    bias_gelu_gradient_codes<T><<<grid, kCastThreads, 0, device.stream>>>(
        pg, px, pb, codes_of(a, scale, amax, pg, px, pb), out<float>(partial));
    check_launch(op);
    reduce_lines_on(device.stream, data<float>(partial), out<T>(dbias), grid.x, a.width, a.width, op);
  });
  return {a.values, a.transposed, amax, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("bias_gelu_cast", TORCH_BOX(&bias_gelu_cast));
  m.impl("bias_gelu_backward_cast", TORCH_BOX(&bias_gelu_backward_cast));
}

}  // namespace megabert
