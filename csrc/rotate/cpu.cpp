// Queries and keys rotated by their tokens' angles; `back`: by the negative angles, as in the gradient.

#include "cpu/kernels.h"
#include "rotate/arguments.h"

namespace megabert {
namespace {

Tensor rotate(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads, bool back) {
  check_cpu("rotate", "qkv", qkv);
  const Turn turn = check_rotate("rotate", qkv, cos, sin, heads);
  const Tensor xc = dense(qkv), cc = dense(cos), sc = dense(sin);
  const Tensor y = torch::stable::empty_like(xc);
  with_cpu_type(xc, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    const T* from = data<T>(xc);
    T* to = out<T>(y);
    const float *c = data<float>(cc), *s = data<float>(sc);
    torch::stable::parallel_for(0, turn.rows, 1 + 8192 / (turn.heads * turn.half), [&](int64_t begin, int64_t end) {
      kernel.rotate(from, c, s, back ? -1.0f : 1.0f, to, turn.heads, turn.half, begin, end);
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) { m.impl("rotate", TORCH_BOX(&rotate)); }

}  // namespace megabert
