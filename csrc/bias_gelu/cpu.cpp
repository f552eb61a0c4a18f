// GELU of x + bias over the last dimension, with a gate (bias_geglu) gelu(a) * b of its halves, and the gradients with the bias's.

#include "bias_gelu/arguments.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

template <bool Gate>
Tensor activate(const Tensor& x, const Tensor& bias) {
  constexpr const char* op = Gate ? "bias_geglu" : "bias_gelu";
  check_cpu(op, "x", x);
  check_activation(op, x, bias, kInputs<Gate>);
  const Tensor xc = dense(x), bc = dense(bias);
  const Tensor y = torch::stable::new_empty(xc, activated(xc, kInputs<Gate>));
  const int64_t columns = bc.numel(), width = columns / kInputs<Gate>, rows = columns ? xc.numel() / columns : 0;
  with_cpu_type(xc, [&](auto type, const auto& kernels) {
    using T = decltype(type);
    const auto kernel = Gate ? kernels.bias_geglu : kernels.bias_gelu;
    const T *px = data<T>(xc), *pb = data<T>(bc);
    T* py = out<T>(y);
    torch::stable::parallel_for(0, rows, 1 + 32768 / (columns + 1),
                                [&](int64_t begin, int64_t end) { kernel(px, pb, py, width, begin, end); });
  });
  return y;
}

// -> dx, dbias
template <bool Gate>
std::tuple<Tensor, Tensor> gradient(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  constexpr const char* op = Gate ? "bias_geglu_backward" : "bias_gelu_backward";
  check_cpu(op, "x", x);
  check_activation_backward(op, grad, x, bias, kInputs<Gate>);
  const Tensor gc = dense(grad), xc = dense(x), bc = dense(bias);
  const Tensor dx = torch::stable::empty_like(xc), dbias = torch::stable::empty_like(bc);
  const int64_t columns = bc.numel(), width = columns / kInputs<Gate>;
  const RowBlocks blocks(columns ? xc.numel() / columns : 0);
  const Tensor partial = torch::stable::new_empty(xc, {blocks.count, columns}, ScalarType::Float);
  float* sums = out<float>(partial);
  with_cpu_type(xc, [&](auto type, const auto& kernels) {
    using T = decltype(type);
    const auto kernel = Gate ? kernels.bias_geglu_backward : kernels.bias_gelu_backward;
    const T *pg = data<T>(gc), *px = data<T>(xc), *pb = data<T>(bc);
    T* pdx = out<T>(dx);
    torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        kernel(pg, px, pb, pdx, sums + b * columns, width, blocks.begin(b), blocks.end(b));
    });
    kernels.reduce_blocks(sums, out<T>(dbias), blocks.count, columns, 0, columns);
  });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&activate<false>));
  m.impl("bias_gelu_backward", TORCH_BOX(&gradient<false>));
  m.impl("bias_geglu", TORCH_BOX(&activate<true>));
  m.impl("bias_geglu_backward", TORCH_BOX(&gradient<true>));
}

}  // namespace megabert
