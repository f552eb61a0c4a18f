// Schemas of all operations. Implementations are registered beside their code, one for each device, under these names.
// All are functional: no output shares memory with an input or another output. Statistics are fp32.

#include "common/errors.h"

#include <torch/csrc/stable/library.h>
#include <sstream>

// Symbols that newer compilers use from libraries newer than those that torch's wheels need (setup.py, glibc_stub), defined here for
// the whole library: from glibc 2.32 (0: there may be threads) and from GCC 9's libstdc++.
extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;
}
#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 9
template std::ostringstream::basic_ostringstream();
#endif

STABLE_TORCH_LIBRARY(megabert, m) {
  // x [..., D], bias [D] -> gelu(x + bias)
  m.def("bias_gelu(Tensor x, Tensor bias) -> Tensor");
  // -> dx, dbias
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)");

  // x [..., 2D], bias [2D] -> gelu(a) * b [..., D] of (a, b) = x + bias
  m.def("bias_geglu(Tensor x, Tensor bias) -> Tensor");
  // -> dx, dbias
  m.def("bias_geglu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)");

  // qkv [..., 3 * H * d], cos, sin fp32 with d / 2 elements for each token -> the same with rotated queries and keys; the gradient is
  // the same operation with `back`
  m.def("rotate(Tensor qkv, Tensor cos, Tensor sin, int heads, bool back) -> Tensor");

  // dropout over x [..., D]; the gradient is the same operation on the gradient
  m.def("dropout(Tensor x, Tensor seed, int stream, float p) -> Tensor");

  // x, residual [..., D]; bias, weight, shift [D] -> y, z [..., D], mean, rstd [...]
  m.def(
      "dropout_add_layer_norm(Tensor x, Tensor bias, Tensor residual, Tensor weight, Tensor shift, Tensor seed, "
      "int stream, float p, float eps) -> (Tensor, Tensor, Tensor, Tensor)");
  // grad: of y; second: of y too (where it is also the residual: post-LN), or of z
  // -> dx (empty without dropout: then it is dresidual), dresidual, dbias, dweight, dshift
  m.def(
      "dropout_add_layer_norm_backward(Tensor grad, Tensor? second, bool of_z, Tensor z, Tensor mean, Tensor rstd, "
      "Tensor weight, Tensor seed, int stream, float p) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");

  // qkv [B, T, 3 * H * d], key_start, key_end int32 [B, T] -> context [B, T, H * d], log-sum-exp [B, H, T]
  // bias [3 * H * d], already included in qkv, for its gradient in backward
  m.def(
      "attention(Tensor qkv, Tensor? bias, Tensor key_start, Tensor key_end, Tensor seed, int stream, int heads, float p) "
      "-> (Tensor, Tensor)");
  // -> dqkv, and its sums over all tokens [3 * H * d]
  m.def(
      "attention_backward(Tensor grad, Tensor qkv, Tensor context, Tensor lse, Tensor key_start, Tensor key_end, "
      "Tensor seed, int stream, int heads, float p) -> (Tensor, Tensor)");

  // scores [B, H, Q, K]; key_start, key_end int32 [B or 1, Q or 1]; mask broadcastable to scores, bool (true: attend) or
  // added -> dropped probabilities, and with dropout the probabilities before it (else empty)
  m.def(
      "softmax_mask(Tensor scores, Tensor? key_start, Tensor? key_end, Tensor? mask, Tensor seed, int stream, float "
      "scale, float p) -> (Tensor, Tensor)");
  // -> dscores
  m.def(
      "softmax_mask_backward(Tensor grad, Tensor probs, Tensor seed, int stream, float scale, float p) -> Tensor");

  // hidden [N, D], weight [V', D], bias [V'], labels int64 [N] -> loss sum (fp32), correct and predictions (int64),
  // log-sum-exp (fp32 [N], 0 where nothing is predicted), and with need_grad the gradients of the sum for hidden, weight
  // and bias (else empty)
  m.def(
      "mlm_loss(Tensor hidden, Tensor weight, Tensor bias, Tensor labels, int vocab_size, bool need_grad) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
