// GELU of x + bias over the last dimension, with a gate (bias_geglu) gelu(a) * b of its halves, and the gradients with the bias's.

#include "bias_gelu/arguments.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

// `forward` gives the kernel in a table of kernels. `inputs`: columns of x for one of the result.
template <class Forward>
Tensor activate(const char* op, const Tensor& x, const Tensor& bias, int64_t inputs, Forward forward) {
  check_cpu(op, "x", x);
  check_activation(op, x, bias, inputs);
  const Tensor xc = dense(x), bc = dense(bias);
  const Tensor y = torch::stable::new_empty(xc, activated(xc, inputs));
  const int64_t columns = bc.numel(), width = columns / inputs, rows = columns ? xc.numel() / columns : 0;
  with_cpu_type(xc, [&](auto type) {
    using T = decltype(type);
    const auto kernel = forward(kernels<T>());
    const T *px = data<T>(xc), *pb = data<T>(bc);
    T* py = out<T>(y);
    torch::stable::parallel_for(0, rows, 1 + 32768 / (columns + 1),
                                [&](int64_t begin, int64_t end) { kernel(px, pb, py, width, begin, end); });
  });
  return y;
}

// -> dx, dbias
template <class Backward>
std::tuple<Tensor, Tensor> activation_gradient(const char* op, const Tensor& grad, const Tensor& x, const Tensor& bias,
                                               int64_t inputs, Backward backward) {
  check_cpu(op, "x", x);
  check_activation_backward(op, grad, x, bias, inputs);
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  const Tensor dx = torch::stable::empty_like(xc), dbias = torch::stable::empty_like(bc);
  const int64_t columns = bc.numel(), width = columns / inputs;
  const RowBlocks blocks(columns ? xc.numel() / columns : 0);
  const Tensor partial = torch::stable::new_empty(xc, {blocks.count, columns}, ScalarType::Float);
  float* sums = out<float>(partial);
  with_cpu_type(xc, [&](auto type) {
    using T = decltype(type);
    const auto kernel = backward(kernels<T>());
    const T *pg = data<T>(gc), *px = data<T>(xc), *pb = data<T>(bc);
    T* pdx = out<T>(dx);
    torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        kernel(pg, px, pb, pdx, sums + b * columns, width, blocks.begin(b), blocks.end(b));
    });
    kernels<T>().reduce_blocks(sums, out<T>(dbias), blocks.count, columns, 0, columns);
  });
  return {dx, dbias};
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  return activate("bias_gelu", x, bias, 1, [](const auto& table) { return table.bias_gelu; });
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  const auto kernel = [](const auto& table) { return table.bias_gelu_backward; };
  return activation_gradient("bias_gelu_backward", grad, x, bias, 1, kernel);
}

Tensor bias_geglu(const Tensor& x, const Tensor& bias) {
  return activate("bias_geglu", x, bias, 2, [](const auto& table) { return table.bias_geglu; });
}

std::tuple<Tensor, Tensor> bias_geglu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  const auto kernel = [](const auto& table) { return table.bias_geglu_backward; };
  return activation_gradient("bias_geglu_backward", grad, x, bias, 2, kernel);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  m.impl("bias_geglu", TORCH_BOX(&bias_geglu));
  m.impl("bias_geglu_backward", TORCH_BOX(&bias_geglu_backward));
}

}  // namespace megabert
