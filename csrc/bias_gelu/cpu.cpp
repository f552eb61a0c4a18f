// GELU of x + bias over the last dimension, and its gradient with the bias's.

#include "bias_gelu/threads.h"
#include "cast_transpose/arguments.h"

namespace megabert {
namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  return activate("bias_gelu", x, bias, 1, [](const auto& table) { return table.bias_gelu; });
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  const auto kernel = [](const auto& table) { return table.bias_gelu_backward; };
  return activation_gradient("bias_gelu_backward", grad, x, bias, 1, kernel);
}

std::tuple<Tensor, Tensor, Tensor> bias_gelu_cast(const Tensor& x, const Tensor& bias, const Tensor& scale) {
  return cast_transpose_on_cpu(bias_gelu(x, bias), scale, false, true, true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bias_gelu_backward_cast(const Tensor& grad, const Tensor& x,
                                                                   const Tensor& bias, const Tensor& scale) {
  const auto [dx, dbias] = bias_gelu_backward(grad, x, bias);
  const auto [values, transposed, amax] = cast_transpose_on_cpu(dx, scale, true, true, true);
  return {values, transposed, amax, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("bias_gelu_cast", TORCH_BOX(&bias_gelu_cast));
  m.impl("bias_gelu_backward_cast", TORCH_BOX(&bias_gelu_backward_cast));
}

}  // namespace megabert
