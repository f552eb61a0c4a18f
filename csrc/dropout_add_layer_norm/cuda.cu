// Dropout, and bias + dropout + residual + LayerNorm, over the last dimension on the GPU, and its gradients.

#include "common/cuda.h"
#include "common/rows.h"
#include "dropout_add_layer_norm/arguments.h"
#include "dropout_add_layer_norm/kernel.cuh"

namespace megabert {
namespace {

Tensor dropout(const Tensor& x, const Tensor& seed, int64_t stream, double p) {
  constexpr const char* op = "dropout";
  check_cuda(op, "x", x);
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension");
  const Dropout mask = check_dropout(op, seed, stream, p, lines_of(x), x);
  const OnDevice device(x);
  const Tensor xc = dense(x);
  Tensor y = torch::stable::empty_like(xc);
  if (!xc.numel()) return y;
  const int64_t width = xc.size(xc.dim() - 1), rows = xc.numel() / width;
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* px = data<T>(xc);
    T* py = out<T>(y);
    with_bool(whole_groups(width, px, py), [&](auto whole) {
      const auto kernel = dropout_forward<T, decltype(whole)::value>;
      kernel<<<resident_column_grid(kernel, rows, width), kColumnThreads, 0, device.stream>>>(
          px, py, mask, seed.const_data_ptr<int64_t>(), rows, width);
      check_launch(op);
    });
  });
  return y;
}

constexpr const char* kForward = "dropout_add_layer_norm";
constexpr const char* kBackward = "dropout_add_layer_norm_backward";

void check_width(const char* op, int64_t width) {
  STD_TORCH_CHECK(width <= kMaxColumns, op, ": the last dimension has size ", width, "; on CUDA at most ", kMaxColumns);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& bias, const Tensor& residual,
                                                   const Tensor& weight, const Tensor& shift, const Tensor& seed,
                                                   int64_t stream, double p, double eps) {
  check_cuda(kForward, "x", x);
  check_layer_norm(kForward, x, bias, residual, weight, shift);
  const int64_t width = bias.numel(), rows = x.numel() / width;
  check_width(kForward, width);
  const Dropout dropout = check_dropout(kForward, seed, stream, p, lines_of(x), x);
  const OnDevice device(x);
  const Tensor xc = dense(x), rc = dense(residual), bc = dense(bias), wc = dense(weight), sc = dense(shift);
  Tensor y = torch::stable::empty_like(xc), z = torch::stable::empty_like(xc);
  Tensor mean = torch::stable::new_empty(xc, rows_of(xc), ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(xc, rows_of(xc), ScalarType::Float);
  if (!rows) return {y, z, mean, rstd};
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const LayerNormRows<T> a{data<T>(xc), data<T>(bc), data<T>(rc), data<T>(wc), data<T>(sc), out<T>(y), out<T>(z),
                             out<float>(mean), out<float>(rstd), rows, width, static_cast<float>(eps)};
    with_bool(whole_groups(width, a.x, a.bias, a.residual, a.weight, a.shift, a.y, a.z), [&](auto whole) {
      with_row_shape(width, [&](auto shape) {
        using S = decltype(shape);
        layer_norm_forward<T, S::threads, S::groups, decltype(whole)::value>
            <<<static_cast<unsigned>(ceil_div(rows, S::rows)), dim3(S::threads, S::rows), 0, device.stream>>>(
                a, dropout, seed.const_data_ptr<int64_t>());
        check_launch(kForward);
      });
    });
  });
  return {y, z, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const std::optional<Tensor>& second,
                                                            bool of_z, const Tensor& z, const Tensor& mean,
                                                            const Tensor& rstd, const Tensor& weight,
                                                            const Tensor& seed, int64_t stream, double p) {
  check_cuda(kBackward, "z", z);
  check_layer_norm_backward(kBackward, grad, second, z, mean, rstd, weight);
  const int64_t width = weight.numel(), rows = z.numel() / width;
  check_width(kBackward, width);
  const Dropout dropout = check_dropout(kBackward, seed, stream, p, lines_of(z), z);
  const OnDevice device(z);
  const Tensor gc = dense(grad), nc = second ? dense(*second) : gc, zc = dense(z), wc = dense(weight), mc = dense(mean),
               rc = dense(rstd);
  // Without dropout the gradient of the branch is that of the residual; an empty tensor stands for it.
  Tensor dx = dropout.threshold ? torch::stable::empty_like(zc) : torch::stable::new_empty(zc, {0});
  Tensor dresidual = torch::stable::empty_like(zc);
  Tensor dbias = torch::stable::new_empty(wc, {width}), dweight = torch::stable::new_empty(wc, {width}),
         dshift = torch::stable::new_empty(wc, {width});
  if (!rows) {
    for (Tensor* t : {&dbias, &dweight, &dshift}) torch::stable::zero_(*t);
    return {dx, dresidual, dbias, dweight, dshift};
  }
  with_type(zc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    LayerNormGradientRows<T> a{data<T>(gc), second ? data<T>(nc) : nullptr, data<T>(zc), data<T>(wc), of_z,
                               data<float>(mc), data<float>(rc), dropout.threshold ? out<T>(dx) : nullptr,
                               out<T>(dresidual), nullptr, rows, width};
    with_bool(whole_groups(width, a.grad, a.second, a.z, a.weight, a.dx, a.dresidual), [&](auto whole) {
      with_block_shape(width, [&](auto shape) {
        constexpr int threads = decltype(shape)::threads;
        const auto kernel = layer_norm_gradient<T, threads, decltype(shape)::groups, decltype(whole)::value>;
        const int64_t resident = resident_blocks(kernel, threads), lines = rows < resident ? rows : resident;
        const Tensor partial = torch::stable::new_empty(zc, {lines, 3, width}, ScalarType::Float);
        a.partial = out<float>(partial);
        kernel<<<static_cast<unsigned>(lines), threads, 0, device.stream>>>(a, dropout, seed.const_data_ptr<int64_t>());
        check_launch(kBackward);
        const LineSums<T, 3> sums{{out<T>(dbias), out<T>(dweight), out<T>(dshift)}};
        reduce_lines_on(device.stream, a.partial, sums, lines, 3 * width, width, kBackward);
      });
    });
  });
  return {dx, dresidual, dbias, dweight, dshift};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&forward));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace megabert
