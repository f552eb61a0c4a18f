// The arguments of bias_geglu and of its gradient, checked, on whichever device they are.
#pragma once

#include "common/check.h"

namespace megabert {

inline void check_bias_geglu(const char* op, const Tensor& x, const Tensor& bias) {
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension");
  check_columns(op, "bias", bias, x);
  STD_TORCH_CHECK(bias.numel() % 2 == 0, op, ": x has ", bias.numel(), " columns, which are no two halves");
}

// The shape of the result: half as many columns.
inline std::vector<int64_t> half_of(const Tensor& x) {
  std::vector<int64_t> shape = shape_of(x);
  shape.back() /= 2;
  return shape;
}

inline void check_bias_geglu_backward(const char* op, const Tensor& grad, const Tensor& x, const Tensor& bias) {
  check_bias_geglu(op, x, bias);
  check_dtype(op, "grad", grad, x.scalar_type());
  STD_TORCH_CHECK(shape_of(grad) == half_of(x), op, ": grad is not half of x in its last dimension");
}

}  // namespace megabert
