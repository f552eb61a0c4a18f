// Multi-head attention over packed rows on the GPU, and its gradient.

#include <cmath>

#include "attention/arguments.h"
#include "attention/backward.cuh"
#include "attention/kernel.cuh"
#include "common/cuda.h"

namespace megabert {
namespace {

AttentionShape check(const char* op, const Tensor& qkv, const std::optional<Tensor>& bias, const Tensor& start,
                     const Tensor& end, int64_t heads) {
  check_cuda(op, "qkv", qkv);
  const AttentionShape shape = check_attention(op, qkv, bias, start, end, heads);
  STD_TORCH_CHECK(qkv.scalar_type() == ScalarType::BFloat16, op, ": qkv has dtype Float, not BFloat16 as on CUDA");
  STD_TORCH_CHECK(shape.size <= kHeadSize && shape.size % kGroup == 0, op, ": heads have size ", shape.size,
                  ", not a multiple of ", kGroup, " up to ", kHeadSize, " as on CUDA");
  STD_TORCH_CHECK(shape.tokens * qkv.size(2) < (int64_t{1} << 31) && shape.batch * shape.heads < (int64_t{1} << 31), op,
                  ": qkv has ", shape.batch, " rows of ", shape.tokens, " x ", qkv.size(2),
                  "; on CUDA rows x heads and the elements of a row are less than 2^31 each");
  return shape;
}

// What the tensor cores multiply.
using T = __nv_bfloat16;

AttentionRows<T> arguments(const AttentionShape& shape, const Tensor& qkv, const Tensor& start, const Tensor& end) {
  AttentionRows<T> a{};
  a.qkv = data<T>(qkv), a.start = data<int32_t>(start), a.end = data<int32_t>(end);
  a.tokens = static_cast<int>(shape.tokens), a.heads = static_cast<int>(shape.heads), a.size = static_cast<int>(shape.size);
  a.root = 1.0f / std::sqrt(static_cast<float>(shape.size));
  return a;
}

std::tuple<Tensor, Tensor> attention(const Tensor& qkv, const std::optional<Tensor>& bias, const Tensor& key_start,
                                     const Tensor& key_end, const Tensor& seed, int64_t stream, int64_t heads,
                                     double p) {
  constexpr const char* op = "attention";
  const AttentionShape shape = check(op, qkv, bias, key_start, key_end, heads);
  const Dropout dropout = check_dropout(op, seed, stream, p, shape.heads * shape.tokens, qkv);
  const OnDevice device(qkv);
  const Tensor qc = aligned(op, "qkv", qkv), start = dense(key_start), end = dense(key_end);
  Tensor context = torch::stable::new_empty(qc, {shape.batch, shape.tokens, shape.heads * shape.size});
  Tensor lse = torch::stable::new_empty(qc, {shape.batch, shape.heads, shape.tokens}, ScalarType::Float);
  if (!lse.numel()) return {context, lse};
  AttentionRows<T> a = arguments(shape, qc, start, end);
  a.context = out<T>(context), a.lse = out<float>(lse);
  const dim3 grid(static_cast<unsigned>(shape.batch * shape.heads),
                  static_cast<unsigned>(ceil_div(shape.tokens, kBlockQueries)));
  attention_forward<T><<<grid, kAttentionThreads, kForwardShared, device.stream>>>(a, dropout, data<int64_t>(seed));
  check_launch(op);
  return {context, lse};
}

std::tuple<Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& qkv, const Tensor& context,
                                              const Tensor& lse, const Tensor& key_start, const Tensor& key_end,
                                              const Tensor& seed, int64_t stream, int64_t heads, double p) {
  constexpr const char* op = "attention_backward";
  const AttentionShape shape = check(op, qkv, {}, key_start, key_end, heads);
  check_attention_backward(op, shape, grad, qkv, context, lse);
  const Dropout dropout = check_dropout(op, seed, stream, p, shape.heads * shape.tokens, qkv);
  const OnDevice device(qkv);
  const Tensor gc = aligned(op, "grad", grad), qc = aligned(op, "qkv", qkv), cc = aligned(op, "context", context),
               lc = dense(lse), start = dense(key_start), end = dense(key_end);
  const int64_t width = 3 * shape.heads * shape.size;
  Tensor dqkv = torch::stable::empty_like(qc), dbias = torch::stable::new_empty(qc, {width});
  if (!lc.numel()) {
    torch::stable::zero_(dbias);
    return {dqkv, dbias};
  }
  const int64_t tiles = ceil_div(shape.tokens, kGradientQueries), blocks = shape.batch * shape.heads;
  const int64_t lines = shape.tokens > kBlockKeys ? tiles * kGradientQueries : 0;
  const Tensor partial = torch::stable::new_empty(qc, {blocks, lines, kHeadSize}, ScalarType::Float),
               sums = torch::stable::new_empty(qc, {shape.batch, width}, ScalarType::Float);
  AttentionRows<T> a = arguments(shape, qc, start, end);
  a.context = const_cast<T*>(data<T>(cc)), a.lse = const_cast<float*>(data<float>(lc));
  a.grad = data<T>(gc), a.dqkv = out<T>(dqkv), a.partial = out<float>(partial);
  a.sums = out<float>(sums);
  const int64_t bytes = GradientShared<T>::bytes(tiles);
  const bool fits = cudaFuncSetAttribute(attention_gradient<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)) == cudaSuccess;
  if (!fits) cudaGetLastError();  // else the next launch would report it
  STD_TORCH_CHECK(fits, op, ": rows of ", shape.tokens, " tokens need ", bytes,
                  " bytes of shared memory a block: more than this GPU has");
  attention_gradient<T><<<static_cast<unsigned>(blocks), kAttentionThreads, static_cast<size_t>(bytes), device.stream>>>(
      a, dropout, data<int64_t>(seed));
  check_launch(op);
  reduce_lines_on(device.stream, data<float>(sums), out<T>(dbias), shape.batch, width, width, op);
  return {dqkv, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace megabert
