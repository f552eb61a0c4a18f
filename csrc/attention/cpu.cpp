// Multi-head attention over packed rows, and its gradient.

#include <cstring>

#include "attention/arguments.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

typedef AttentionShape Shape;

void check_bounds(const char* op, const int32_t* start, const int32_t* end, const Shape& shape) {
  for (int64_t i = 0; i < shape.batch * shape.tokens; ++i) {
    STD_TORCH_CHECK(start[i] >= 0 && end[i] <= shape.tokens, op, ": key_start, key_end of token ", i, " are ", start[i],
                    ", ", end[i], ", outside [0, ", shape.tokens, "]");
  }
}

// Heads are shared out first: then all shares hold all rows and are equally long. With more threads than a share of the
// heads suits, rows are shared out too.
template <class F>
void for_each_part(const Shape& shape, F f) {
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
Attention<T> arguments(const Tensor& qkv, const Tensor& start, const Tensor& end, const Shape& shape,
                       const Dropout& dropout, const Tensor& lse) {
  Attention<T> args{};
  args.qkv = static_cast<const T*>(qkv.const_data_ptr());
  args.start = start.const_data_ptr<int32_t>();
  args.end = end.const_data_ptr<int32_t>();
  args.lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr()));
  args.batch = shape.batch, args.tokens = shape.tokens, args.heads = shape.heads, args.size = shape.size;
  args.dropout = dropout;
  return args;
}

std::tuple<Tensor, Tensor> attention(const Tensor& qkv, const std::optional<Tensor>& bias, const Tensor& key_start,
                                     const Tensor& key_end, const Tensor& seed, int64_t stream, int64_t heads,
                                     double p) {
  constexpr const char* op = "attention";
  check_cpu(op, "qkv", qkv);
  const Shape shape = check_attention(op, qkv, bias, key_start, key_end, heads);
  const Dropout dropout = make_dropout(op, seed, stream, p, shape.heads * shape.tokens);
  const Tensor qc = dense(qkv), start = dense(key_start), end = dense(key_end);
  check_bounds(op, start.const_data_ptr<int32_t>(), end.const_data_ptr<int32_t>(), shape);
  Tensor context = torch::stable::new_empty(qc, {shape.batch, shape.tokens, shape.heads * shape.size});
  Tensor lse = torch::stable::new_empty(qc, {shape.batch, shape.heads, shape.tokens}, ScalarType::Float);
  with_cpu_type(qc, [&](auto type) {
    using T = decltype(type);
    const Kernels<T>& kernel = kernels<T>();
    Attention<T> args = arguments<T>(qc, start, end, shape, dropout, lse);
    args.context = static_cast<T*>(context.mutable_data_ptr());
    for_each_part(shape, [&](const Heads& part) { kernel.attention(args, part); });
  });
  return {context, lse};
}

std::tuple<Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& qkv, const Tensor& context,
                                              const Tensor& lse, const Tensor& key_start, const Tensor& key_end,
                                              const Tensor& seed, int64_t stream, int64_t heads, double p) {
  constexpr const char* op = "attention_backward";
  check_cpu(op, "qkv", qkv);
  const Shape shape = check_attention(op, qkv, {}, key_start, key_end, heads);
  check_attention_backward(op, shape, grad, qkv, context, lse);
  const Dropout dropout = make_dropout(op, seed, stream, p, shape.heads * shape.tokens);
  const Tensor gc = dense(grad), qc = dense(qkv), cc = dense(context), lc = dense(lse),
               start = dense(key_start), end = dense(key_end);
  check_bounds(op, start.const_data_ptr<int32_t>(), end.const_data_ptr<int32_t>(), shape);
  const int64_t width = 3 * shape.heads * shape.size;
  Tensor dqkv = torch::stable::empty_like(qc), dbias = torch::stable::new_empty(qc, {width});
  const Tensor sums = torch::stable::new_empty(qc, {shape.batch, width}, ScalarType::Float);
  with_cpu_type(qc, [&](auto type) {
    using T = decltype(type);
    const Kernels<T>& kernel = kernels<T>();
    Attention<T> args = arguments<T>(qc, start, end, shape, dropout, lc);
    args.context = static_cast<T*>(const_cast<void*>(cc.const_data_ptr()));
    args.grad = static_cast<const T*>(gc.const_data_ptr());
    args.dqkv = static_cast<T*>(dqkv.mutable_data_ptr());
    args.sums = static_cast<float*>(sums.mutable_data_ptr());
    for_each_part(shape, [&](const Heads& part) { kernel.attention_backward(args, part); });
    kernel.reduce_blocks(args.sums, static_cast<T*>(dbias.mutable_data_ptr()), shape.batch, width, 0, width);
  });
  return {dqkv, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace megabert
