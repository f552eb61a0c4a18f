// gelu(a) * b of (a, b) = x + bias over the last dimension's halves on the GPU, and its gradient with the bias's.

#include "bias_gelu/launch.h"

#include "bias_geglu/kernel.cuh"

namespace megabert {
namespace {

Tensor bias_geglu(const Tensor& x, const Tensor& bias) { return activate<GegluKernels>("bias_geglu", x, bias); }

std::tuple<Tensor, Tensor> bias_geglu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  return activation_gradient<GegluKernels>("bias_geglu_backward", grad, x, bias);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("bias_geglu", TORCH_BOX(&bias_geglu));
  m.impl("bias_geglu_backward", TORCH_BOX(&bias_geglu_backward));
}

}  // namespace megabert
