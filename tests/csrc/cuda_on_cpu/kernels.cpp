// The CUDA kernels of csrc, compiled for the CPU, as C functions. Launches are those of the .cu files, with a few blocks in
// place of a GPU's. Every function gives a message, empty where all went well.
#include "cuda.h"

#include "common/device.cuh"
#include "mma.h"

#include "attention/backward.cuh"
#include "attention/kernel.cuh"
#include "bias_gelu/kernel.cuh"
#include "common/rows.h"
#include "dropout_add_layer_norm/kernel.cuh"
#include "mlm_loss/kernel.cuh"
#include "rotate/kernel.cuh"
#include "softmax_mask/kernel.cuh"

using namespace megabert;
using cuda_on_cpu::launch;

namespace {

// As Python gives it: a pointer to whatever is wanted.
struct Pointer {
  void* address;
  template <class T>
  operator T*() const { return static_cast<T*>(address); }
};

std::string message;
const char* message_of(std::string text) {
  message = text;
  return message.c_str();
}

bool aligned(int64_t width, std::initializer_list<const void*> pointers) {
  bool whole = width % kGroup == 0;
  for (const void* p : pointers) whole = whole && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  return whole;
}

template <class F>
const char* with_type(int type, F f) {
  return message_of(type == 0 ? f(__nv_bfloat16{}) : f(float{}));
}
// f of the type, and of whether rows are whole groups
template <class F>
const char* with_groups(int type, int64_t width, std::initializer_list<const void*> pointers, F f) {
  return with_type(type, [&](auto t) {
    return with_bool(aligned(width, pointers), [&](auto whole) { return f(t, whole); });
  });
}

constexpr int64_t kBlocks = 3;  // of kernels that loop over rows: fewer than rows, so that they loop

template <class F>
std::string launch_columns(int64_t width, bool backwards, F kernel) {
  const dim3 grid(kBlocks, (width + kColumnThreads * kGroup - 1) / (kColumnThreads * kGroup));
  return launch(grid, kColumnThreads, backwards, kernel);
}
// f of the shape of the blocks for rows of this width
template <class F>
std::string launch_rows(int64_t rows, int64_t width, bool backwards, F f) {
  return with_row_shape(width, [&](auto shape) {
    using S = decltype(shape);
    return launch(dim3((rows + S::rows - 1) / S::rows), dim3(S::threads, S::rows), backwards, [&] { f(shape); });
  });
}

template <class T, int Vectors>
std::string reduce(bool backwards, const float* partial, const LineSums<T, Vectors>& sums, int64_t lines,
                   int64_t width) {
  return launch(dim3((Vectors * width + kWarp - 1) / kWarp), dim3(kWarp, kLineThreads), backwards,
                [&] { reduce_lines<T, Vectors>(partial, sums, lines, width); });
}

template <class T>
AttentionRows<T> attention_rows(Pointer qkv, Pointer start, Pointer end, Pointer context, Pointer lse, int64_t tokens,
                                int64_t heads, int64_t size) {
  AttentionRows<T> a{};
  a.qkv = qkv, a.start = start, a.end = end, a.context = context, a.lse = lse;
  a.tokens = tokens, a.heads = heads, a.size = size, a.root = 1.0f / std::sqrt(static_cast<float>(size));
  return a;
}

int64_t lines_of_a_row = 0;  // of the dropout mask, where the seed has a second element

Dropout dropout_of(int64_t stream, double p) {
  Dropout dropout = Dropout::make(0, stream, p);
  dropout.lines = lines_of_a_row;
  return dropout;
}
}  // namespace

extern "C" {

void set_lines_of_a_row(int64_t lines) { lines_of_a_row = lines; }
void* guarded(size_t bytes) { return cuda_on_cpu::guarded(bytes); }
void release(void* p, size_t bytes) { cuda_on_cpu::release(p, bytes); }

const char* softmax_mask(int type, bool backwards, const SoftmaxMask* a, Pointer scores, Pointer out, Pointer probs,
                         int64_t rows, int64_t stream, double p, Pointer seed) {
  return with_type(type, [&](auto t) {
    const bool whole = aligned(a->keys, {scores, out, probs});
    return launch_rows(rows, a->keys, backwards, [&](auto shape) {
      using S = decltype(shape);
      softmax_mask_forward<decltype(t), S::threads, S::groups>(*a, scores, out, probs, dropout_of(stream, p), seed, rows,
                                                               whole);
    });
  });
}

const char* softmax_mask_backward(int type, bool backwards, Pointer grad, Pointer probs, Pointer dscores, int64_t keys,
                                  double scale, int64_t rows, int64_t stream, double p, Pointer seed) {
  return with_type(type, [&](auto t) {
    const bool whole = aligned(keys, {grad, probs, dscores});
    return launch_rows(rows, keys, backwards, [&](auto shape) {
      using S = decltype(shape);
      softmax_mask_gradient<decltype(t), S::threads, S::groups>(grad, probs, dscores, keys, scale, dropout_of(stream, p),
                                                                seed, rows, whole);
    });
  });
}

const char* activate(int type, bool backwards, bool gate, Pointer x, Pointer bias, Pointer y, int64_t rows, int64_t width) {
  return with_groups(type, width, {x, bias, y}, [&](auto t, auto whole) {
    return with_bool(gate, [&](auto gated) {
      const auto kernel = activation_forward<decltype(t), decltype(gated)::value, decltype(whole)::value>;
      return launch_columns(width, backwards, [&] { kernel(x, bias, y, rows, width); });
    });
  });
}

const char* activate_backward(int type, bool backwards, bool gate, Pointer grad, Pointer x, Pointer bias, Pointer dx,
                              Pointer partial, Pointer dbias, int64_t rows, int64_t width) {
  return with_groups(type, width, {grad, x, bias, dx}, [&](auto t, auto whole) {
    using T = decltype(t);
    const std::string result = with_bool(gate, [&](auto gated) {
      const auto kernel = activation_gradient<T, decltype(gated)::value, decltype(whole)::value>;
      return launch_columns(width, backwards, [&] { kernel(grad, x, bias, dx, partial, rows, width); });
    });
    const int64_t columns = (1 + gate) * width;
    return result.empty() ? reduce(backwards, partial, LineSums<T, 1>{{dbias}}, kBlocks, columns) : result;
  });
}

const char* rotate(int type, bool backwards, Pointer x, Pointer cos, Pointer sin, Pointer y, int64_t rows, int64_t heads,
                   int64_t half, bool back) {
  return with_groups(type, half, {x, cos, sin, y}, [&](auto t, auto whole) {
    const auto kernel = rotate_heads<decltype(t), decltype(whole)::value>;
    return launch_columns(3 * heads * ((half + kGroup - 1) / kGroup) * kGroup, backwards,
                          [&] { kernel(x, cos, sin, back ? -1.0f : 1.0f, y, rows, heads, half); });
  });
}

const char* dropout(int type, bool backwards, Pointer x, Pointer y, int64_t rows, int64_t width, int64_t stream, double p,
                    Pointer seed) {
  return with_groups(type, width, {x, y}, [&](auto t, auto whole) {
    const auto kernel = dropout_forward<decltype(t), decltype(whole)::value>;
    return launch_columns(width, backwards, [&] { kernel(x, y, dropout_of(stream, p), seed, rows, width); });
  });
}

const char* layer_norm(int type, bool backwards, Pointer x, Pointer bias, Pointer residual, Pointer weight, Pointer shift,
                       Pointer y, Pointer z, Pointer mean, Pointer rstd, int64_t rows, int64_t width, double eps,
                       int64_t stream, double p, Pointer seed) {
  return with_groups(type, width, {x, bias, residual, weight, shift, y, z}, [&](auto t, auto whole) {
    using T = decltype(t);
    const LayerNormRows<T> a{x, bias, residual, weight, shift, y, z, mean, rstd, rows, width, static_cast<float>(eps)};
    return launch_rows(rows, width, backwards, [&](auto shape) {
      using S = decltype(shape);
      layer_norm_forward<T, S::threads, S::groups, decltype(whole)::value>(a, dropout_of(stream, p), seed);
    });
  });
}

// second: another gradient of y, or (of_z) that of z; partial [3, 3, width]; vectors: dbias, dweight, dshift
const char* layer_norm_backward(int type, bool backwards, Pointer grad, Pointer second, bool of_z, Pointer z,
                                Pointer weight, Pointer mean, Pointer rstd, Pointer dx, Pointer dresidual, Pointer partial,
                                Pointer dbias, Pointer dweight, Pointer dshift, int64_t rows, int64_t width,
                                int64_t stream, double p, Pointer seed) {
  return with_groups(type, width, {grad, second, z, weight, dx, dresidual}, [&](auto t, auto whole) {
    using T = decltype(t);
    const LayerNormGradientRows<T> a{grad, second, z, weight, of_z, mean, rstd, dx, dresidual, partial, rows, width};
    const std::string result = with_block_shape(width, [&](auto shape) {
      using S = decltype(shape);
      return launch(kBlocks, S::threads, backwards, [&] {
        layer_norm_gradient<T, S::threads, S::groups, decltype(whole)::value>(a, dropout_of(stream, p), seed);
      });
    });
    const LineSums<T, 3> sums{{dbias, dweight, dshift}};
    return result.empty() ? reduce(backwards, partial, sums, kBlocks, width) : result;
  });
}

// logits [rows, stride] become their gradient; partial [3, stride]
const char* mlm_loss(int type, bool backwards, Pointer logits, Pointer bias, Pointer labels, Pointer loss, Pointer lse,
                     Pointer correct, Pointer partial, Pointer dbias, Pointer total, Pointer hits, Pointer predictions,
                     int64_t rows, int64_t vocab, int64_t stride) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    constexpr int threads = 512;
    const bool whole = aligned(stride, {logits, bias});
    const LossRows<T> a{logits, bias, labels, loss, lse, correct, vocab, stride, true, whole};
    std::string result = launch(rows, threads, backwards, [&] { mlm_loss_rows<T, threads>(a); });
    if (result.empty())
      result = launch_columns(stride, backwards, [&] { column_sums<T>(a.logits, partial, rows, stride, whole); });
    if (result.empty()) result = reduce(backwards, partial, LineSums<T, 1>{{dbias}}, kBlocks, stride);
    if (result.empty())
      result = launch(1, kTotalThreads, backwards,
                      [&] { loss_totals(loss, correct, labels, rows, total, hits, predictions); });
    return result;
  });
}

using T = __nv_bfloat16;

const char* attention(int, bool backwards, Pointer qkv, Pointer start, Pointer end, Pointer context, Pointer lse,
                      int64_t batch, int64_t tokens, int64_t heads, int64_t size, int64_t stream, double p, Pointer seed) {
  const AttentionRows<T> a = attention_rows<T>(qkv, start, end, context, lse, tokens, heads, size);
  const dim3 grid(batch * heads, (tokens + kBlockQueries - 1) / kBlockQueries);
  return message_of(launch(grid, kAttentionThreads, backwards,
                           [&] { attention_forward<T>(a, dropout_of(stream, p), seed); }, kForwardShared));
}

// sums [batch, 3 * heads * size], dbias [3 * heads * size]; partial [batch * heads, tokens to whole tiles, kHeadSize] where
// there are more than kBlockKeys tokens
const char* attention_backward(int, bool backwards, Pointer grad, Pointer qkv, Pointer context, Pointer lse, Pointer start,
                               Pointer end, Pointer dqkv, Pointer dbias, Pointer sums, Pointer partial, int64_t batch,
                               int64_t tokens, int64_t heads, int64_t size, int64_t stream, double p, Pointer seed) {
  AttentionRows<T> a = attention_rows<T>(qkv, start, end, context, lse, tokens, heads, size);
  a.grad = grad, a.dqkv = dqkv, a.partial = partial, a.sums = sums;
  const int64_t bytes = GradientShared<T>::bytes((tokens + kGradientQueries - 1) / kGradientQueries);
  const auto kernel = [&] { attention_gradient<T>(a, dropout_of(stream, p), seed); };
  const std::string result = launch(batch * heads, kAttentionThreads, backwards, kernel, (bytes + 15) / 16 * 16);
  const int64_t width = 3 * heads * size;
  return message_of(result.empty() ? reduce(backwards, sums, LineSums<T, 1>{{dbias}}, batch, width) : result);
}

// Kernels that are wrong on purpose: what the harness must notice.
__global__ void divergent_barrier() {
  if (threadIdx.x % 2) __syncthreads();
}
__global__ void past_the_end(const float* x, float* y, int64_t count) { y[threadIdx.x % count] = x[threadIdx.x]; }

const char* wrong_barrier() { return message_of(launch(1, 64, false, [] { divergent_barrier(); })); }
const char* wrong_bounds(Pointer x, Pointer y, int64_t count) {
  return message_of(launch(1, count + 1, false, [&] { past_the_end(x, y, count); }));
}

}  // extern "C"
