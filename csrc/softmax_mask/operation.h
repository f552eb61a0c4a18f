// Scale, mask, softmax and dropout of attention scores in one pass, and its gradient.
#pragma once

#include <optional>

#include "common/check.h"
#include "softmax_mask/mask.h"

namespace megabert {

constexpr const char* kScoreDimensions = " (batch, head, query, key)";

// Stride of a dimension of t with `size` elements, 0 if t broadcasts in it.
inline int64_t broadcast_stride(const char* op, const char* name, const Tensor& t, int64_t d, int64_t size) {
  STD_TORCH_CHECK(t.size(d) == size || t.size(d) == 1, op, ": ", name, " has size ", t.size(d), " in dimension ", d,
                  ", neither ", size, " nor 1");
  return t.size(d) == 1 ? 0 : t.stride(d);
}

inline const int32_t* bound_of(const char* op, const char* name, const std::optional<Tensor>& t, const Tensor& scores,
                               int64_t (&stride)[2]) {
  if (!t) return nullptr;
  check_dtype(op, name, *t, scores, ScalarType::Int);
  check_dimensions(op, name, *t, 2, " (batch, query)");
  for (int d = 0; d < 2; ++d) stride[d] = broadcast_stride(op, name, *t, d, scores.size(2 * d));
  return data<int32_t>(*t);
}

inline SoftmaxMask softmax_mask_arguments(const char* op, const Tensor& scores, const std::optional<Tensor>& start,
                                          const std::optional<Tensor>& end, const std::optional<Tensor>& mask,
                                          double scale) {
  check_compute_dtype(op, "scores", scores);
  check_dimensions(op, "scores", scores, 4, kScoreDimensions);
  SoftmaxMask a{};
  a.heads = scores.size(1), a.queries = scores.size(2), a.keys = scores.size(3);
  a.scale = static_cast<float>(scale);
  a.start = bound_of(op, "key_start", start, scores, a.start_stride);
  a.end = bound_of(op, "key_end", end, scores, a.end_stride);
  if (mask) {
    check_device(op, "mask", *mask, scores);
    const ScalarType type = mask->scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Bool || type == scores.scalar_type(), op, ": mask has dtype ",
                    torch::headeronly::toString(type), ", not Bool or that of scores");
    a.kind = type == ScalarType::Bool ? MaskKind::allowed : MaskKind::added;
    check_dimensions(op, "mask", *mask, 4, kScoreDimensions);
    for (int64_t d = 0; d < 4; ++d) a.mask_stride[d] = broadcast_stride(op, "mask", *mask, d, scores.size(d));
    a.mask = mask->const_data_ptr();
  }
  return a;
}

template <class Device>
std::tuple<Tensor, Tensor> softmax_mask(const Tensor& scores, const std::optional<Tensor>& start,
                                        const std::optional<Tensor>& end, const std::optional<Tensor>& mask,
                                        const Tensor& seed, int64_t stream, double scale, double p) {
  const Device device("softmax_mask", "scores", scores);
  const SoftmaxMask a = softmax_mask_arguments(device.op, scores, start, end, mask, scale);
  check_keys(device, a, scores.size(0));
  const Dropout dropout = check_dropout(device.op, seed, stream, p, lines_of(scores), scores);
  const Tensor sc = dense(scores), result = torch::stable::empty_like(sc);
  const Tensor probs = dropout.threshold ? torch::stable::empty_like(sc) : torch::stable::new_empty(sc, {0});
  if (!sc.numel()) return {result, probs};
  Device::with_type(sc, [&](auto type) {
    using T = decltype(type);
    T* weights = dropout.threshold ? out<T>(probs) : nullptr;
    run_forward(device, a, data<T>(sc), out<T>(result), weights, dropout, seed, sc.numel() / a.keys);
  });
  return {result, probs};
}

template <class Device>
Tensor softmax_mask_backward(const Tensor& grad, const Tensor& probs, const Tensor& seed, int64_t stream, double scale,
                             double p) {
  const Device device("softmax_mask_backward", "probs", probs);
  check_compute_dtype(device.op, "probs", probs);
  check_dimensions(device.op, "probs", probs, 4, kScoreDimensions);
  check_like(device.op, "grad", grad, "probs", probs);
  SoftmaxMask a{};
  a.keys = probs.size(3), a.scale = static_cast<float>(scale);
  check_keys(device, a, probs.size(0));
  const Dropout dropout = check_dropout(device.op, seed, stream, p, lines_of(probs), probs);
  const Tensor gc = dense(grad), pc = dense(probs), dscores = torch::stable::empty_like(pc);
  if (!pc.numel()) return dscores;
  Device::with_type(pc, [&](auto type) {
    using T = decltype(type);
    run_backward(device, a, data<T>(gc), data<T>(pc), out<T>(dscores), dropout, seed, pc.numel() / a.keys);
  });
  return dscores;
}

}  // namespace megabert
