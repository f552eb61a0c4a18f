// Checks of the arguments of bias_gelu and bias_geglu and of their gradients, on any device.
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

inline void check_activation_backward(const char* op, const Tensor& grad, const Tensor& x, const Tensor& bias,
                                      int64_t inputs) {
  check_activation(op, x, bias, inputs);
  if (inputs == 1) return check_like(op, "grad", grad, "x", x);
  check_device(op, "grad", grad, x);
  check_dtype(op, "grad", grad, x.scalar_type());
  STD_TORCH_CHECK(shape_of(grad) == activated(x, inputs), op, ": grad is not half of x in its last dimension");
}

}  // namespace megabert
