// GELU of x + bias over the last dimension, and its gradient with the bias's.

#include "bias_gelu/threads.h"

namespace megabert {
namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  return activate("bias_gelu", x, bias, 1, [](const auto& table) { return table.bias_gelu; });
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  const auto kernel = [](const auto& table) { return table.bias_gelu_backward; };
  return activation_gradient("bias_gelu_backward", grad, x, bias, 1, kernel);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace megabert
