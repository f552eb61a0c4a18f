// Scale, mask, softmax and dropout of attention scores in one pass on the GPU, and its gradient.

#include "common/cuda.h"
#include "common/rows.h"
#include "softmax_mask/arguments.h"
#include "softmax_mask/kernel.cuh"

namespace megabert {
namespace {

void check_keys(const char* op, int64_t keys) {
  STD_TORCH_CHECK(keys <= kMaxColumns, op, ": scores has ", keys, " keys; on CUDA at most ", kMaxColumns);
}

std::tuple<Tensor, Tensor> softmax_mask(const Tensor& scores, const std::optional<Tensor>& start,
                                        const std::optional<Tensor>& end, const std::optional<Tensor>& mask,
                                        const Tensor& seed, int64_t stream, double scale, double p) {
  constexpr const char* op = "softmax_mask";
  check_cuda(op, "scores", scores);
  const SoftmaxMask a = softmax_mask_arguments(op, scores, start, end, mask, scale);
  check_keys(op, a.keys);
  const Dropout dropout = check_dropout(op, seed, stream, p, lines_of(scores), scores);
  const OnDevice device(scores);
  const Tensor sc = dense(scores);
  Tensor result = torch::stable::empty_like(sc);
  Tensor probs = dropout.threshold ? torch::stable::empty_like(sc) : torch::stable::new_empty(sc, {0});
  const int64_t rows = a.keys ? sc.numel() / a.keys : 0;
  if (!rows) return {result, probs};
  with_type(sc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* x = data<T>(sc);
    T *y = out<T>(result), *weights = dropout.threshold ? out<T>(probs) : nullptr;
    const bool whole = whole_groups(a.keys, x, y, weights);
    with_row_shape(a.keys, [&](auto shape) {
      constexpr int threads = decltype(shape)::threads, groups = decltype(shape)::groups, together = decltype(shape)::rows;
      softmax_mask_forward<T, threads, groups>
          <<<static_cast<unsigned>(ceil_div(rows, together)), dim3(threads, together), 0, device.stream>>>(
              a, x, y, weights, dropout, seed.const_data_ptr<int64_t>(), rows, whole);
      check_launch(op);
    });
  });
  return {result, probs};
}

Tensor softmax_mask_backward(const Tensor& grad, const Tensor& probs, const Tensor& seed, int64_t stream, double scale,
                             double p) {
  constexpr const char* op = "softmax_mask_backward";
  check_cuda(op, "probs", probs);
  check_softmax_mask_backward(op, grad, probs);
  const int64_t keys = probs.size(3), rows = keys ? probs.numel() / keys : 0;
  check_keys(op, keys);
  const Dropout dropout = check_dropout(op, seed, stream, p, lines_of(probs), probs);
  const OnDevice device(probs);
  const Tensor gc = dense(grad), pc = dense(probs);
  Tensor dscores = torch::stable::empty_like(pc);
  if (!rows) return dscores;
  with_type(pc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T *g = data<T>(gc), *weights = data<T>(pc);
    T* d = out<T>(dscores);
    const bool whole = whole_groups(keys, g, weights, d);
    with_row_shape(keys, [&](auto shape) {
      constexpr int threads = decltype(shape)::threads, groups = decltype(shape)::groups, together = decltype(shape)::rows;
      softmax_mask_gradient<T, threads, groups>
          <<<static_cast<unsigned>(ceil_div(rows, together)), dim3(threads, together), 0, device.stream>>>(
              g, weights, d, keys, static_cast<float>(scale), dropout, seed.const_data_ptr<int64_t>(), rows, whole);
      check_launch(op);
    });
  });
  return dscores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("softmax_mask", TORCH_BOX(&softmax_mask));
  m.impl("softmax_mask_backward", TORCH_BOX(&softmax_mask_backward));
}

}  // namespace megabert
