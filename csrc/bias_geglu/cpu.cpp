// gelu(a) * b of (a, b) = x + bias over the last dimension's halves, and its gradient with the bias's.

#include "bias_gelu/threads.h"

namespace megabert {
namespace {

Tensor bias_geglu(const Tensor& x, const Tensor& bias) {
  return activate("bias_geglu", x, bias, 2, [](const auto& table) { return table.bias_geglu; });
}

std::tuple<Tensor, Tensor> bias_geglu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  const auto kernel = [](const auto& table) { return table.bias_geglu_backward; };
  return activation_gradient("bias_geglu_backward", grad, x, bias, 2, kernel);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_geglu", TORCH_BOX(&bias_geglu));
  m.impl("bias_geglu_backward", TORCH_BOX(&bias_geglu_backward));
}

}  // namespace megabert
