// Queries and keys rotated by their tokens' angles on the GPU; `back`: by the negative angles, as in the gradient.

#include "common/cuda.h"

#include "common/rows.h"
#include "rotate/arguments.h"
#include "rotate/kernel.cuh"

namespace megabert {
namespace {

Tensor rotate(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads, bool back) {
  constexpr const char* op = "rotate";
  check_cuda(op, "qkv", qkv);
  const Turn turn = check_rotate(op, qkv, cos, sin, heads);
  const OnDevice device(qkv);
  const Tensor xc = dense(qkv), cc = dense(cos), sc = dense(sin);
  const Tensor y = torch::stable::empty_like(xc);
  if (!turn.rows) return y;
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* from = data<T>(xc);
    T* to = out<T>(y);
    const float *c = data<float>(cc), *s = data<float>(sc);
    with_bool(whole_groups(turn.half, from, to, c, s), [&](auto whole) {
      const auto kernel = rotate_heads<T, decltype(whole)::value>;
      const int64_t tasks = 3 * turn.heads * ceil_div(turn.half, kGroup);
      kernel<<<resident_column_grid(kernel, turn.rows, tasks * kGroup), kColumnThreads, 0, device.stream>>>(
          from, c, s, back ? -1.0f : 1.0f, to, turn.rows, turn.heads, turn.half);
      check_launch(op);
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) { m.impl("rotate", TORCH_BOX(&rotate)); }

}  // namespace megabert
