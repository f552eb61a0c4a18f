// GELU of x + bias over the last dimension on the GPU, and its gradient with the bias's.

#include "bias_gelu/launch.h"

#include "bias_gelu/cast.cuh"
#include "cast_transpose/launch.h"

namespace megabert {
namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) { return activate<GeluKernels>("bias_gelu", x, bias); }

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  return activation_gradient<GeluKernels>("bias_gelu_backward", grad, x, bias);
}

std::tuple<Tensor, Tensor, Tensor> bias_gelu_cast(const Tensor& x, const Tensor& bias, const Tensor& scale) {
  constexpr const char* op = "bias_gelu_cast";
  check_cuda(op, "x", x);
  check_activation(op, x, bias, 1);
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
  check_activation_backward(op, grad, x, bias, 1);
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
