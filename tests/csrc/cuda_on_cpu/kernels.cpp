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

std::string message;
const char* message_of(std::string text) {
  message = text;
  return message.c_str();
}

template <class F>
const char* with_type(int type, F f) {
  return message_of(type == 0 ? f(__nv_bfloat16{}) : f(float{}));
}

bool aligned(int64_t width, std::initializer_list<const void*> pointers) {
  bool whole = width % kGroup == 0;
  for (const void* p : pointers) whole = whole && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  return whole;
}

constexpr int64_t kBlocks = 3;  // of kernels that loop over rows: fewer than rows, so that they loop

dim3 column_grid(int64_t width) {
  return dim3(kBlocks, (width + kColumnThreads * kGroup - 1) / (kColumnThreads * kGroup));
}


template <class T, int Vectors>
std::string reduce(bool backwards, const float* partial, const LineSums<T, Vectors>& sums, int64_t lines, int64_t stride,
                   int64_t width) {
  return launch(dim3((Vectors * width + kWarp - 1) / kWarp), dim3(kWarp, kLineThreads), backwards,
                [&] { reduce_lines<T, Vectors>(partial, sums, lines, stride, width); });
}
template <class T>
std::string reduce(bool backwards, const float* partial, T* result, int64_t lines, int64_t stride, int64_t width) {
  return reduce(backwards, partial, LineSums<T, 1>{{result}}, lines, stride, width);
}

template <bool Gate>
const char* activate(int type, bool backwards, const void* x, const void* bias, void* y, int64_t rows, int64_t width) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    std::string result;
    with_bool(aligned(width, {x, bias, y}), [&](auto whole) {
      const auto kernel = activation_forward<T, Gate, decltype(whole)::value>;
      result = launch(column_grid(width), kColumnThreads, backwards, [&] {
        kernel(static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(y), rows, width);
      });
    });
    return result;
  });
}

template <bool Gate>
const char* activate_backward(int type, bool backwards, const void* grad, const void* x, const void* bias, void* dx,
                                float* partial, void* dbias, int64_t rows, int64_t width) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    std::string result;
    with_bool(aligned(width, {grad, x, bias, dx}), [&](auto whole) {
      const auto kernel = activation_gradient<T, Gate, decltype(whole)::value>;
      result = launch(column_grid(width), kColumnThreads, backwards, [&] {
        kernel(static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(dx),
               partial, rows, width);
      });
    });
    const int64_t columns = (1 + Gate) * width;
    return result.empty() ? reduce(backwards, partial, static_cast<T*>(dbias), kBlocks, columns, columns) : result;
  });
}

template <class T>
AttentionRows<T> attention_rows(const void* qkv, const int32_t* start, const int32_t* end, int64_t tokens, int64_t heads,
                                int64_t size) {
  AttentionRows<T> a{};
  a.qkv = static_cast<const T*>(qkv), a.start = start, a.end = end;
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

const char* softmax_mask(int type, bool backwards, const SoftmaxMask* a, const void* scores, void* out, void* probs,
                         int64_t rows, int64_t stream, double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    std::string result;
    const bool whole = aligned(a->keys, {scores, out, probs});
    with_row_shape(a->keys, [&](auto shape) {
      using S = decltype(shape);
      result = launch(dim3((rows + S::rows - 1) / S::rows), dim3(S::threads, S::rows), backwards, [&] {
        softmax_mask_forward<T, S::threads, S::groups>(*a, static_cast<const T*>(scores), static_cast<T*>(out),
                                                       static_cast<T*>(probs), dropout_of(stream, p), seed, rows, whole);
      });
    });
    return result;
  });
}

const char* softmax_mask_backward(int type, bool backwards, const void* grad, const void* probs, void* dscores,
                                  int64_t keys, double scale, int64_t rows, int64_t stream, double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    std::string result;
    const bool whole = aligned(keys, {grad, probs, dscores});
    with_row_shape(keys, [&](auto shape) {
      using S = decltype(shape);
      result = launch(dim3((rows + S::rows - 1) / S::rows), dim3(S::threads, S::rows), backwards, [&] {
        softmax_mask_gradient<T, S::threads, S::groups>(static_cast<const T*>(grad), static_cast<const T*>(probs),
                                                        static_cast<T*>(dscores), keys, static_cast<float>(scale),
                                                        dropout_of(stream, p), seed, rows, whole);
      });
    });
    return result;
  });
}

#include "layer.h"

// logits [rows, stride] become their gradient; partial [3, stride]
const char* mlm_loss(int type, bool backwards, void* logits, const void* bias, const int64_t* labels, float* loss,
                     float* lse, int32_t* correct, float* partial, void* dbias, float* total, int64_t* hits,
                     int64_t* predictions, int64_t rows, int64_t vocab, int64_t stride) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    constexpr int threads = 512;
    const LossRows<T> a{static_cast<T*>(logits), static_cast<const T*>(bias), labels, loss, lse, correct,
                        vocab, stride, true,
                        aligned(stride, {logits, bias})};
    std::string result = launch(rows, threads, backwards, [&] { mlm_loss_rows<T, threads>(a); });
    if (result.empty())
      result = launch(column_grid(stride), kColumnThreads, backwards, [&] { column_sums<T>(a.logits, partial, rows, stride, a.whole); });
    if (result.empty()) result = reduce(backwards, partial, static_cast<T*>(dbias), kBlocks, stride, stride);
    if (result.empty())
      result = launch(1, kTotalThreads, backwards,
                      [&] { loss_totals(loss, correct, labels, rows, total, hits, predictions); });
    return result;
  });
}

using T = __nv_bfloat16;

const char* attention(int, bool backwards, const void* qkv, const int32_t* start, const int32_t* end, void* context,
                      float* lse, int64_t batch, int64_t tokens, int64_t heads, int64_t size, int64_t stream, double p,
                      const int64_t* seed) {
  AttentionRows<T> a = attention_rows<T>(qkv, start, end, tokens, heads, size);
  a.context = static_cast<T*>(context), a.lse = lse;
  const dim3 grid(batch * heads, (tokens + kBlockQueries - 1) / kBlockQueries);
  return message_of(launch(grid, kAttentionThreads, backwards,
                           [&] { attention_forward<T>(a, dropout_of(stream, p), seed); }, kForwardShared));
}

// sums [batch, 3 * heads * size], dbias [3 * heads * size]; partial [batch * heads, tokens to whole tiles, kHeadSize] where
// there are more than kBlockKeys tokens
const char* attention_backward(int, bool backwards, const void* grad, const void* qkv, const void* context,
                               const float* lse, const int32_t* start, const int32_t* end, void* dqkv, void* dbias,
                               float* sums, float* partial, int64_t batch, int64_t tokens, int64_t heads, int64_t size, int64_t stream, double p,
                               const int64_t* seed) {
  AttentionRows<T> a = attention_rows<T>(qkv, start, end, tokens, heads, size);
  a.context = static_cast<T*>(const_cast<void*>(context)), a.lse = const_cast<float*>(lse);
  a.grad = static_cast<const T*>(grad), a.dqkv = static_cast<T*>(dqkv), a.partial = partial;
  a.sums = sums;
  const int64_t bytes = GradientShared<T>::bytes((tokens + kGradientQueries - 1) / kGradientQueries);
  const std::string result = launch(batch * heads, kAttentionThreads, backwards,
                                    [&] { attention_gradient<T>(a, dropout_of(stream, p), seed); },
                                    (bytes + 15) / 16 * 16);
  const int64_t width = 3 * heads * size;
  return message_of(result.empty() ? reduce(backwards, sums, static_cast<T*>(dbias), batch, width, width) : result);
}

// Kernels that are wrong on purpose: what the harness must notice.
__global__ void divergent_barrier() {
  if (threadIdx.x % 2) __syncthreads();
}
__global__ void past_the_end(const float* x, float* y, int64_t count) { y[threadIdx.x % count] = x[threadIdx.x]; }

const char* wrong_barrier() { return message_of(launch(1, 64, false, [] { divergent_barrier(); })); }
const char* wrong_bounds(const float* x, float* y, int64_t count) {
  return message_of(launch(1, count + 1, false, [&] { past_the_end(x, y, count); }));
}

}  // extern "C"
