// Multi-head attention over packed rows, and its gradient.

#include "attention/arguments.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

void check_bounds(const char* op, const int32_t* start, const int32_t* end, const AttentionShape& shape) {
  for (int64_t i = 0; i < shape.batch * shape.tokens; ++i) {
    STD_TORCH_CHECK(start[i] >= 0 && end[i] <= shape.tokens, op, ": key_start, key_end of token ", i, " are ", start[i],
                    ", ", end[i], ", outside [0, ", shape.tokens, "]");
  }
}

// Heads are shared out first: then all shares hold all rows and are equally long. With more threads than a share of the
// heads suits, rows are shared out too.
template <class F>
void for_each_part(const AttentionShape& shape, F f) {
  const int64_t threads = torch::stable::get_num_threads();
  int64_t groups = shape.heads < threads ? shape.heads : threads;
  while (shape.heads % groups) --groups;
  const int64_t size = shape.heads / groups, rows = groups == threads ? shape.batch : 1;
  const int64_t parts = shape.batch ? groups * (shape.batch / rows) : 0;
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / groups * rows, head = i % groups * size;
      f(Heads{row, row + rows < shape.batch ? row + rows : shape.batch, head, head + size});
    }
  });
}

template <class T>
Attention<T> arguments(const Tensor& qkv, const Tensor& start, const Tensor& end, const AttentionShape& shape,
                       const Dropout& dropout, const Tensor& context, const Tensor& lse) {
  Attention<T> a{};
  a.qkv = data<T>(qkv), a.start = data<int32_t>(start), a.end = data<int32_t>(end);
  a.context = const_cast<T*>(data<T>(context)), a.lse = const_cast<float*>(data<float>(lse));
  a.batch = shape.batch, a.tokens = shape.tokens, a.heads = shape.heads, a.size = shape.size, a.dropout = dropout;
  return a;
}

std::tuple<Tensor, Tensor> attention(const Tensor& qkv, const std::optional<Tensor>& bias, const Tensor& key_start,
                                     const Tensor& key_end, const Tensor& seed, int64_t stream, int64_t heads,
                                     double p) {
  constexpr const char* op = "attention";
  check_cpu(op, "qkv", qkv);
  const AttentionShape shape = check_attention(op, qkv, bias, key_start, key_end, heads);
  const Dropout dropout = make_dropout(op, seed, stream, p, shape.heads * shape.tokens);
  const Tensor qc = dense(qkv), start = dense(key_start), end = dense(key_end);
  check_bounds(op, data<int32_t>(start), data<int32_t>(end), shape);
  Tensor context = torch::stable::new_empty(qc, {shape.batch, shape.tokens, shape.heads * shape.size});
  Tensor lse = torch::stable::new_empty(qc, {shape.batch, shape.heads, shape.tokens}, ScalarType::Float);
  with_cpu_type(qc, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    const Attention<T> args = arguments<T>(qc, start, end, shape, dropout, context, lse);
    for_each_part(shape, [&](const Heads& part) { kernel.attention(args, part); });
  });
  return {context, lse};
}

std::tuple<Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& qkv, const Tensor& context,
                                              const Tensor& lse, const Tensor& key_start, const Tensor& key_end,
                                              const Tensor& seed, int64_t stream, int64_t heads, double p) {
  constexpr const char* op = "attention_backward";
  check_cpu(op, "qkv", qkv);
  const AttentionShape shape = check_attention(op, qkv, {}, key_start, key_end, heads);
  check_attention_backward(op, shape, grad, qkv, context, lse);
  const Dropout dropout = make_dropout(op, seed, stream, p, shape.heads * shape.tokens);
  const Tensor gc = dense(grad), qc = dense(qkv), cc = dense(context), lc = dense(lse),
               start = dense(key_start), end = dense(key_end);
  check_bounds(op, data<int32_t>(start), data<int32_t>(end), shape);
  const int64_t width = 3 * shape.heads * shape.size;
  Tensor dqkv = torch::stable::empty_like(qc), dbias = torch::stable::new_empty(qc, {width});
  const Tensor sums = torch::stable::new_empty(qc, {shape.batch, width}, ScalarType::Float);
  with_cpu_type(qc, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    Attention<T> args = arguments<T>(qc, start, end, shape, dropout, cc, lc);
    args.grad = data<T>(gc), args.dqkv = out<T>(dqkv), args.sums = out<float>(sums);
    for_each_part(shape, [&](const Heads& part) { kernel.attention(args, part); });
    kernel.reduce_blocks(args.sums, out<T>(dbias), shape.batch, width, 0, width);
  });
  return {dqkv, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace megabert
