// Checks of the arguments of dropout_add_layer_norm and of its gradient, on any device.
#pragma once

#include <optional>

#include "common/check.h"

namespace megabert {

inline void check_layer_norm(const char* op, const Tensor& x, const Tensor& bias, const Tensor& residual,
                             const Tensor& weight, const Tensor& shift) {
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, op, ": x has no columns");
  check_like(op, "residual", residual, "x", x);
  check_columns(op, "bias", bias, x);
  check_columns(op, "weight", weight, x);
  check_columns(op, "shift", shift, x);
}

inline void check_layer_norm_backward(const char* op, const Tensor& grad, const std::optional<Tensor>& second,
                                      const Tensor& z, const Tensor& mean, const Tensor& rstd, const Tensor& weight) {
  check_compute_dtype(op, "z", z);
  STD_TORCH_CHECK(z.dim() >= 1 && z.size(z.dim() - 1) > 0, op, ": z has no columns");
  check_like(op, "grad", grad, "z", z);
  if (second) check_like(op, "second", *second, "z", z);
  check_columns(op, "weight", weight, z);
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"mean", mean}, {"rstd", rstd}}) {
    check_device(op, name, t, z);
    check_dtype(op, name, t, ScalarType::Float);
    STD_TORCH_CHECK(t.numel() == z.numel() / weight.numel(), op, ": ", name, " has not one element a row");
  }
}

// The shape of the statistics: x without its last dimension.
inline std::vector<int64_t> rows_of(const Tensor& x) {
  std::vector<int64_t> shape = shape_of(x);
  shape.pop_back();
  return shape;
}

}  // namespace megabert
