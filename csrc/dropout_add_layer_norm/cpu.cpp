// Dropout, and bias + dropout + residual + LayerNorm, over the last dimension, and its gradients.

#include "cpu/kernels.h"
#include "dropout_add_layer_norm/arguments.h"

namespace megabert {
namespace {

Tensor dropout(const Tensor& x, const Tensor& seed, int64_t stream, double p) {
  constexpr const char* op = "dropout";
  check_cpu(op, "x", x);
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension");
  const Dropout mask = make_dropout(op, seed, stream, p, lines_of(x));
  const Tensor xc = dense(x);
  const int64_t width = x.size(x.dim() - 1), rows = width ? x.numel() / width : 0;
  Tensor y = torch::stable::empty_like(xc);
  with_cpu_type(x, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    const T* input = data<T>(xc);
    T* output = out<T>(y);
    torch::stable::parallel_for(0, rows, 1 + 32768 / (width + 1), [&](int64_t begin, int64_t end) {
      kernel.dropout(input, output, width, mask, begin, end);
    });
  });
  return y;
}

constexpr const char* kForward = "dropout_add_layer_norm";
constexpr const char* kBackward = "dropout_add_layer_norm_backward";

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& bias, const Tensor& residual,
                                                   const Tensor& weight, const Tensor& shift, const Tensor& seed,
                                                   int64_t stream, double p, double eps) {
  check_cpu(kForward, "x", x);
  check_layer_norm(kForward, x, bias, residual, weight, shift);
  const Dropout dropout = make_dropout(kForward, seed, stream, p, lines_of(x));
  const Tensor xc = dense(x), rc = dense(residual), bc = dense(bias), wc = dense(weight), sc = dense(shift);
  const int64_t width = bias.numel(), rows = x.numel() / width;
  Tensor y = torch::stable::empty_like(xc), z = torch::stable::empty_like(xc);
  Tensor mean = torch::stable::new_empty(xc, rows_of(xc), ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(xc, rows_of(xc), ScalarType::Float);
  with_cpu_type(x, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    torch::stable::parallel_for(0, rows, 1 + 32768 / width, [&](int64_t begin, int64_t end) {
      kernel.dropout_add_layer_norm(data<T>(xc), data<T>(bc), data<T>(rc), data<T>(wc), data<T>(sc), out<T>(y), out<T>(z),
                                    out<float>(mean), out<float>(rstd), width, dropout, static_cast<float>(eps), begin,
                                    end);
    });
  });
  return {y, z, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const std::optional<Tensor>& second,
                                                            bool of_z, const Tensor& z, const Tensor& mean,
                                                            const Tensor& rstd, const Tensor& weight,
                                                            const Tensor& seed, int64_t stream, double p) {
  check_cpu(kBackward, "z", z);
  check_layer_norm_backward(kBackward, grad, second, z, mean, rstd, weight);
  const int64_t width = weight.numel();
  const RowBlocks blocks(z.numel() / width);
  const Dropout dropout = make_dropout(kBackward, seed, stream, p, lines_of(z));
  const Tensor gc = dense(grad), nc = second ? dense(*second) : gc, zc = dense(z),
               wc = dense(weight), mc = dense(mean), rc = dense(rstd);
  // Without dropout the gradient of the branch is that of the residual; an empty tensor stands for it.
  Tensor dx = dropout.threshold ? torch::stable::empty_like(zc) : torch::stable::new_empty(zc, {0});
  Tensor dresidual = torch::stable::empty_like(zc);
  Tensor dbias = torch::stable::new_empty(wc, {width}), dweight = torch::stable::new_empty(wc, {width}),
         dshift = torch::stable::new_empty(wc, {width});
  const Tensor partial = torch::stable::new_empty(zc, {blocks.count, 3, width}, ScalarType::Float);
  with_cpu_type(z, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    const LayerNormBackward<T> args{
        data<T>(gc),     second ? data<T>(nc) : nullptr,          data<T>(zc),       data<T>(wc), of_z,   data<float>(mc),
        data<float>(rc), dropout.threshold ? out<T>(dx) : nullptr, out<T>(dresidual), width,       dropout};
    float* sums = out<float>(partial);
    torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        kernel.dropout_add_layer_norm_backward(args, sums + b * 3 * width, blocks.begin(b), blocks.end(b));
    });
    T* results[3] = {out<T>(dbias), out<T>(dweight), out<T>(dshift)};
    for (int i = 0; i < 3; ++i) kernel.reduce_blocks(sums + i * width, results[i], blocks.count, 3 * width, 0, width);
  });
  return {dx, dresidual, dbias, dweight, dshift};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&forward));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace megabert
