// The arguments of bias_gelu and of its gradient, checked, on whichever device they are.
#pragma once

#include "common/check.h"

namespace megabert {

inline void check_bias_gelu(const char* op, const Tensor& x, const Tensor& bias) {
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension");
  check_columns(op, "bias", bias, x);
}

inline void check_bias_gelu_backward(const char* op, const Tensor& grad, const Tensor& x, const Tensor& bias) {
  check_bias_gelu(op, x, bias);
  check_like(op, "grad", grad, "x", x);
}

}  // namespace megabert
