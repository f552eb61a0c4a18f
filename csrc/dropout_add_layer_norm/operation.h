// Dropout, and bias + dropout + residual + LayerNorm, over the last dimension, and its gradients.
#pragma once

#include <optional>

#include "common/check.h"
#include "dropout_add_layer_norm/arguments.h"

namespace megabert {

template <class Device>
Tensor dropout(const Tensor& x, const Tensor& seed, int64_t stream, double p) {
  const Device device("dropout", "x", x);
  check_compute_dtype(device.op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, device.op, ": x has no dimension");
  const Dropout mask = check_dropout(device.op, seed, stream, p, lines_of(x), x);
  const Tensor xc = dense(x), y = torch::stable::empty_like(xc);
  if (!y.numel()) return y;
  const int64_t width = x.size(x.dim() - 1), rows = x.numel() / width;
  Device::with_type(x, [&](auto type) {
    using T = decltype(type);
    run_dropout(device, data<T>(xc), out<T>(y), mask, seed, rows, width);
  });
  return y;
}

// The shape of the statistics: x without its last dimension.
inline std::vector<int64_t> rows_of(const Tensor& x) {
  std::vector<int64_t> shape = shape_of(x);
  shape.pop_back();
  return shape;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& bias, const Tensor& residual,
                                                      const Tensor& weight, const Tensor& shift, const Tensor& seed,
                                                      int64_t stream, double p, double eps) {
  const Device device("dropout_add_layer_norm", "x", x);
  const char* op = device.op;
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, op, ": x has no columns");
  check_like(op, "residual", residual, "x", x);
  check_columns(op, "bias", bias, x);
  check_columns(op, "weight", weight, x);
  check_columns(op, "shift", shift, x);
  const int64_t width = bias.numel(), rows = x.numel() / width;
  check_width(device, width);
  const Dropout dropout = check_dropout(op, seed, stream, p, lines_of(x), x);
  const Tensor xc = dense(x), rc = dense(residual), bc = dense(bias), wc = dense(weight), sc = dense(shift);
  const Tensor y = torch::stable::empty_like(xc), z = torch::stable::empty_like(xc),
               mean = torch::stable::new_empty(xc, rows_of(xc), ScalarType::Float),
               rstd = torch::stable::new_empty(xc, rows_of(xc), ScalarType::Float);
  if (!rows) return {y, z, mean, rstd};
  Device::with_type(x, [&](auto type) {
    using T = decltype(type);
    const LayerNormRows<T> a{data<T>(xc), data<T>(bc), data<T>(rc), data<T>(wc), data<T>(sc), out<T>(y), out<T>(z),
                             out<float>(mean), out<float>(rstd), rows, width, static_cast<float>(eps)};
    run_forward(device, a, dropout, seed);
  });
  return {y, z, mean, rstd};
}

// -> dx (empty without dropout), dresidual, dbias, dweight, dshift
template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& grad, const std::optional<Tensor>& second, bool of_z, const Tensor& z, const Tensor& mean,
    const Tensor& rstd, const Tensor& weight, const Tensor& seed, int64_t stream, double p) {
  const Device device("dropout_add_layer_norm_backward", "z", z);
  const char* op = device.op;
  check_compute_dtype(op, "z", z);
  STD_TORCH_CHECK(z.dim() >= 1 && z.size(z.dim() - 1) > 0, op, ": z has no columns");
  check_like(op, "grad", grad, "z", z);
  if (second) check_like(op, "second", *second, "z", z);
  check_columns(op, "weight", weight, z);
  const int64_t width = weight.numel(), rows = z.numel() / width;
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"mean", mean}, {"rstd", rstd}}) {
    check_dtype(op, name, t, z, ScalarType::Float);
    STD_TORCH_CHECK(t.numel() == rows, op, ": ", name, " has not one element a row");
  }
  check_width(device, width);
  const Dropout dropout = check_dropout(op, seed, stream, p, lines_of(z), z);
  const Tensor gc = dense(grad), nc = second ? dense(*second) : gc, zc = dense(z), wc = dense(weight), mc = dense(mean),
               rc = dense(rstd);
  // Without dropout the gradient of the branch is that of the residual; an empty tensor stands for it.
  const Tensor dx = dropout.threshold ? torch::stable::empty_like(zc) : torch::stable::new_empty(zc, {0}),
               dresidual = torch::stable::empty_like(zc);
  Tensor dbias = torch::stable::new_empty(wc, {width}), dweight = torch::stable::new_empty(wc, {width}),
         dshift = torch::stable::new_empty(wc, {width});
  if (!rows) {
    for (Tensor* t : {&dbias, &dweight, &dshift}) torch::stable::zero_(*t);
    return {dx, dresidual, dbias, dweight, dshift};
  }
  Device::with_type(z, [&](auto type) {
    using T = decltype(type);
    const LayerNormGradientRows<T> a{
        data<T>(gc), second ? data<T>(nc) : nullptr, data<T>(zc), data<T>(wc), of_z, data<float>(mc), data<float>(rc),
        dropout.threshold ? out<T>(dx) : nullptr, out<T>(dresidual), nullptr, rows, width};
    run_backward(device, a, dropout, seed, std::array<T*, 3>{out<T>(dbias), out<T>(dweight), out<T>(dshift)});
  });
  return {dx, dresidual, dbias, dweight, dshift};
}

}  // namespace megabert
