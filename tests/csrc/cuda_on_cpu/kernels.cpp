// The CUDA kernels of csrc, compiled for the CPU, as C functions. Launches are those of the .cu files, with a few blocks in
// place of a GPU's. Every function gives a message, empty where all went well.
#include "cuda.h"

#include "bias_gelu/kernel.cuh"
#include "common/rows.h"
#include "dropout/kernel.cuh"
#include "dropout_add_layer_norm/kernel.cuh"
#include "mlm_loss/kernel.cuh"
#include "softmax_mask/kernel.cuh"

using namespace megabert;
using cuda_on_cpu::launch;

namespace {

std::string message;
const char* said(std::string text) {
  message = text;
  return message.c_str();
}

template <class F>
const char* with_type(int type, F f) {
  if (type == 0) return said(f(__nv_bfloat16{}));
  if (type == 1) return said(f(__half{}));
  return said(f(float{}));
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

template <class T>
std::string reduce(bool backwards, const float* partial, T* result, int64_t lines, int64_t stride, int64_t width) {
  return launch(dim3((width + kWarp - 1) / kWarp), dim3(kWarp, kLineThreads), backwards,
                [&] { reduce_lines<T>(partial, result, lines, stride, width); });
}

}  // namespace

extern "C" {

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
                                                       static_cast<T*>(probs), Dropout::make(0, stream, p), seed, rows, whole);
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
                                                        Dropout::make(0, stream, p), seed, rows, whole);
      });
    });
    return result;
  });
}

const char* bias_gelu(int type, bool backwards, const void* x, const void* bias, void* y, int64_t rows, int64_t width) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    return launch(column_grid(width), kColumnThreads, backwards, [&] {
      bias_gelu_forward<T>(static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(y), rows, width,
                           aligned(width, {x, bias, y}));
    });
  });
}

const char* bias_gelu_backward(int type, bool backwards, const void* grad, const void* x, const void* bias, void* dx,
                               float* partial, void* dbias, int64_t rows, int64_t width) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    const std::string result = launch(column_grid(width), kColumnThreads, backwards, [&] {
      bias_gelu_gradient<T>(static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<const T*>(bias),
                            static_cast<T*>(dx), partial, rows, width, aligned(width, {grad, x, bias, dx}));
    });
    return result.empty() ? reduce(backwards, partial, static_cast<T*>(dbias), kBlocks, width, width) : result;
  });
}

const char* dropout(int type, bool backwards, const void* x, void* y, int64_t rows, int64_t width, int64_t stream,
                    double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    return launch(column_grid(width), kColumnThreads, backwards, [&] {
      dropout_forward<T>(static_cast<const T*>(x), static_cast<T*>(y), Dropout::make(0, stream, p), seed, rows, width,
                         aligned(width, {x, y}));
    });
  });
}

const char* layer_norm(int type, bool backwards, const void* x, const void* bias, const void* residual,
                       const void* weight, const void* shift, void* y, void* z, float* mean, float* rstd, int64_t rows,
                       int64_t width, double eps, int64_t stream, double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    const LayerNormRows<T> a{static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<const T*>(residual),
                             static_cast<const T*>(weight), static_cast<const T*>(shift), static_cast<T*>(y),
                             static_cast<T*>(z), mean, rstd, rows, width, static_cast<float>(eps),
                             aligned(width, {x, bias, residual, weight, shift, y, z})};
    std::string result;
    with_row_shape(width, [&](auto shape) {
      using S = decltype(shape);
      result = launch(dim3((rows + S::rows - 1) / S::rows), dim3(S::threads, S::rows), backwards, [&] {
        layer_norm_forward<T, S::threads, S::groups>(a, Dropout::make(0, stream, p), seed);
      });
    });
    return result;
  });
}

// partial [3, 3, width]; vectors: dbias, dweight, dshift
const char* layer_norm_backward(int type, bool backwards, const void* grad, const void* grad_z, const void* z,
                                const void* weight, const float* mean, const float* rstd, void* dx, void* dresidual,
                                float* partial, void* dbias, void* dweight, void* dshift, int64_t rows, int64_t width,
                                int64_t stream, double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    const LayerNormGradientRows<T> a{static_cast<const T*>(grad), static_cast<const T*>(grad_z), static_cast<const T*>(z),
                                     static_cast<const T*>(weight), mean, rstd, static_cast<T*>(dx),
                                     static_cast<T*>(dresidual), partial, rows, width,
                                     aligned(width, {grad, grad_z, z, weight, dx, dresidual})};
    std::string result;
    with_block_shape(width, [&](auto shape) {
      using S = decltype(shape);
      result = launch(kBlocks, S::threads, backwards, [&] {
        layer_norm_gradient<T, S::threads, S::groups>(a, Dropout::make(0, stream, p), seed);
      });
    });
    void* vectors[3] = {dbias, dweight, dshift};
    for (int i = 0; i < 3 && result.empty(); ++i)
      result = reduce(backwards, partial + i * width, static_cast<T*>(vectors[i]), kBlocks, 3 * width, width);
    return result;
  });
}

// logits [rows, stride] become their gradient; partial [3, stride]
const char* mlm_loss(int type, bool backwards, void* logits, const void* bias, const int64_t* labels, float* loss,
                     float* lse, int32_t* correct, float* partial, void* dbias, float* total, int64_t* right,
                     int64_t* predictions, int64_t rows, int64_t vocab, int64_t stride, double smoothing, double z_loss) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    constexpr int threads = 512;
    const LossRows<T> a{static_cast<T*>(logits), static_cast<const T*>(bias), labels, loss, lse, correct,
                        {static_cast<float>(smoothing), static_cast<float>(z_loss)}, vocab, stride, true,
                        aligned(stride, {logits, bias})};
    std::string result = launch(rows, threads, backwards, [&] { mlm_loss_rows<T, threads>(a); });
    if (result.empty())
      result = launch(column_grid(stride), kColumnThreads, backwards, [&] { column_sums<T>(a.logits, partial, rows, stride, a.whole); });
    if (result.empty()) result = reduce(backwards, partial, static_cast<T*>(dbias), kBlocks, stride, stride);
    if (result.empty())
      result = launch(1, kTotalThreads, backwards,
                      [&] { loss_totals(loss, correct, labels, rows, total, right, predictions); });
    return result;
  });
}

// Kernels that are wrong on purpose: what the harness must notice.
__global__ void divergent_barrier() {
  if (threadIdx.x % 2) __syncthreads();
}
__global__ void past_the_end(const float* x, float* y, int64_t count) { y[threadIdx.x % count] = x[threadIdx.x]; }

const char* wrong_barrier() { return said(launch(1, 64, false, [] { divergent_barrier(); })); }
const char* wrong_bounds(const float* x, float* y, int64_t count) {
  return said(launch(1, count + 1, false, [&] { past_the_end(x, y, count); }));
}

}  // extern "C"
