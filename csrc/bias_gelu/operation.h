// GELU of x + bias over the last dimension, with a gate (bias_geglu) gelu(a) * b of its halves, and the gradients with the bias's.
#pragma once

#include "common/check.h"

namespace megabert {

// Columns of x for one of the result, `inputs` of the checks.
template <bool Gate>
constexpr int64_t kInputs = Gate ? 2 : 1;

inline void check_activation(const char* op, const Tensor& x, const Tensor& bias, int64_t inputs) {
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension");
  check_columns(op, "bias", bias, x);
  STD_TORCH_CHECK(bias.numel() % inputs == 0, op, ": x has ", bias.numel(), " columns, which are no two halves");
}

// The shape of the result.
inline std::vector<int64_t> activated(const Tensor& x, int64_t inputs) {
  std::vector<int64_t> shape = shape_of(x);
  shape.back() /= inputs;
  return shape;
}

template <class Device, bool Gate>
Tensor activate(const Tensor& x, const Tensor& bias) {
  const Device device(Gate ? "bias_geglu" : "bias_gelu", "x", x);
  check_activation(device.op, x, bias, kInputs<Gate>);
  const Tensor xc = dense(x), bc = dense(bias);
  const Tensor y = torch::stable::new_empty(xc, activated(xc, kInputs<Gate>));
  if (!y.numel()) return y;
  const int64_t width = bc.numel() / kInputs<Gate>, rows = y.numel() / width;
  Device::with_type(xc, [&](auto type) {
    using T = decltype(type);
    run_forward(device, std::bool_constant<Gate>{}, data<T>(xc), data<T>(bc), out<T>(y), rows, width);
  });
  return y;
}

// -> dx, dbias
template <class Device, bool Gate>
std::tuple<Tensor, Tensor> gradient(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  const Device device(Gate ? "bias_geglu_backward" : "bias_gelu_backward", "x", x);
  const char* op = device.op;
  check_activation(op, x, bias, kInputs<Gate>);
  check_dtype(op, "grad", grad, x, x.scalar_type());
  STD_TORCH_CHECK(shape_of(grad) == activated(x, kInputs<Gate>), op, ": grad ",
                  Gate ? "is not half of x in its last dimension" : "has another shape than x");
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  Tensor dx = torch::stable::empty_like(xc), dbias = torch::stable::empty_like(bc);
  const int64_t columns = bc.numel(), rows = columns ? xc.numel() / columns : 0;
  if (!rows) {
    torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  Device::with_type(xc, [&](auto type) {
    using T = decltype(type);
    run_backward(device, std::bool_constant<Gate>{}, data<T>(gc), data<T>(xc), data<T>(bc), out<T>(dx), dbias, rows,
                 columns / kInputs<Gate>);
  });
  return {dx, dbias};
}

}  // namespace megabert
