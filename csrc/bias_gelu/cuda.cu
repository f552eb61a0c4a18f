// GELU of x + bias over the last dimension on the GPU, and its gradient with the bias's.

#include "bias_gelu/launch.h"

#include "bias_gelu/kernel.cuh"

namespace megabert {
namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) { return activate<GeluKernels>("bias_gelu", x, bias); }

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  return activation_gradient<GeluKernels>("bias_gelu_backward", grad, x, bias);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace megabert
