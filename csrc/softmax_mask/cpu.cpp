// Scale, mask, softmax and dropout of attention scores in one pass, and its gradient.

#include "cpu/kernels.h"
#include "softmax_mask/arguments.h"

namespace megabert {
namespace {

// Bounds are data: on the CPU they are checked before use.
void check_range(const char* op, const char* name, const int32_t* bound, const int64_t (&stride)[2],
                 const Tensor& scores) {
  if (!bound) return;
  for (int64_t b = 0; b < scores.size(0); ++b)
    for (int64_t q = 0; q < scores.size(2); ++q) {
      const int32_t value = bound[b * stride[0] + q * stride[1]];
      STD_TORCH_CHECK(value >= 0 && value <= scores.size(3), op, ": ", name, "[", b, ", ", q, "] is ", value,
                      ", outside [0, ", scores.size(3), "]");
      if (!stride[1]) break;
    }
}

int64_t grain(int64_t keys) { return 1 + 65536 / (keys + 1); }

std::tuple<Tensor, Tensor> softmax_mask(const Tensor& scores, const std::optional<Tensor>& start,
                                        const std::optional<Tensor>& end, const std::optional<Tensor>& mask,
                                        const Tensor& seed, int64_t stream, double scale, double p) {
  constexpr const char* op = "softmax_mask";
  const SoftmaxMask a = softmax_mask_arguments(op, scores, start, end, mask, scale);
  check_range(op, "key_start", a.start, a.start_stride, scores);
  check_range(op, "key_end", a.end, a.end_stride, scores);
  const Dropout dropout = make_dropout(op, seed, stream, p, lines_of(scores));
  const Tensor sc = dense(scores);
  Tensor result = torch::stable::empty_like(sc);
  Tensor probs = dropout.threshold ? torch::stable::empty_like(sc) : torch::stable::new_empty(sc, {0});
  with_cpu_type(sc, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    const T* x = data<T>(sc);
    T *y = out<T>(result), *weights = dropout.threshold ? out<T>(probs) : nullptr;
    const int64_t rows = a.keys ? sc.numel() / a.keys : 0;
    torch::stable::parallel_for(0, rows, grain(a.keys), [&](int64_t first, int64_t last) {
      kernel.softmax_mask(a, x, y, weights, dropout, first, last);
    });
  });
  return {result, probs};
}

Tensor softmax_mask_backward(const Tensor& grad, const Tensor& probs, const Tensor& seed, int64_t stream, double scale,
                             double p) {
  constexpr const char* op = "softmax_mask_backward";
  check_softmax_mask_backward(op, grad, probs);
  const Dropout dropout = make_dropout(op, seed, stream, p, lines_of(probs));
  const Tensor gc = dense(grad), pc = dense(probs);
  Tensor dscores = torch::stable::empty_like(pc);
  with_cpu_type(pc, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    const T *g = data<T>(gc), *weights = data<T>(pc);
    T* d = out<T>(dscores);
    const int64_t keys = pc.size(3), rows = keys ? pc.numel() / keys : 0;
    torch::stable::parallel_for(0, rows, grain(keys), [&](int64_t first, int64_t last) {
      kernel.softmax_mask_backward(g, weights, d, keys, static_cast<float>(scale), dropout, first, last);
    });
  });
  return dscores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("softmax_mask", TORCH_BOX(&softmax_mask));
  m.impl("softmax_mask_backward", TORCH_BOX(&softmax_mask_backward));
}

}  // namespace megabert
