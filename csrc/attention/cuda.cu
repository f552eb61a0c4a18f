// attention and its gradient on CUDA.

#include "attention/backward.cuh"
#include "attention/kernel.cuh"
#include "attention/operation.h"
#include "common/cuda.h"

namespace megabert {

// What the tensor cores multiply.
using T = __nv_bfloat16;

struct TensorCores : Cuda {
  using Cuda::Cuda;

  template <class F>
  static void with_type(const Tensor&, F f) { f(T{}); }
};

static void check_limits(const Cuda& device, const Tensor& qkv, const Tensor&, const Tensor&,
                         const AttentionShape& shape) {
  const char* op = device.op;
  STD_TORCH_CHECK(qkv.scalar_type() == ScalarType::BFloat16, op, ": qkv has dtype Float, not BFloat16 as on CUDA");
  STD_TORCH_CHECK(shape.size <= kHeadSize && shape.size % kGroup == 0, op, ": heads have size ", shape.size,
                  ", not a multiple of ", kGroup, " up to ", kHeadSize, " as on CUDA");
  STD_TORCH_CHECK(shape.tokens * qkv.size(2) < (int64_t{1} << 31) && shape.batch * shape.heads < (int64_t{1} << 31), op,
                  ": qkv has ", shape.batch, " rows of ", shape.tokens, " x ", qkv.size(2),
                  "; on CUDA rows x heads and the elements of a row are less than 2^31 each");
}

static void run_forward(const Cuda& device, const AttentionRows<T>& a, const Dropout& dropout, const Tensor& seed,
                        int64_t batch) {
  const dim3 grid(static_cast<unsigned>(batch * a.heads), static_cast<unsigned>(ceil_div(a.tokens, kBlockQueries)));
  attention_forward<T><<<grid, kAttentionThreads, kForwardShared, device.stream>>>(a, dropout, data<int64_t>(seed));
  check_launch(device.op);
}

static void run_backward(const Cuda& device, AttentionRows<T> a, const Dropout& dropout, const Tensor& seed,
                         int64_t batch, const Tensor& dbias) {
  const int64_t tiles = ceil_div(a.tokens, kGradientQueries), blocks = batch * a.heads;
  const int64_t lines = a.tokens > kBlockKeys ? tiles * kGradientQueries : 0;
  const Tensor partial = torch::stable::new_empty(dbias, {blocks, lines, kHeadSize}, ScalarType::Float);
  a.partial = out<float>(partial);
  const int64_t bytes = GradientShared<T>::bytes(tiles);
  const bool fits = cudaFuncSetAttribute(attention_gradient<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)) == cudaSuccess;
  if (!fits) cudaGetLastError();  // else the next launch would report it
  STD_TORCH_CHECK(fits, device.op, ": rows of ", a.tokens, " tokens need ", bytes,
                  " bytes of shared memory a block: more than this GPU has");
  attention_gradient<T><<<static_cast<unsigned>(blocks), kAttentionThreads, static_cast<size_t>(bytes), device.stream>>>(
      a, dropout, data<int64_t>(seed));
  check_launch(device.op);
  launch_reduce(device, a.sums, LineSums<T, 1>{{out<T>(dbias)}}, batch, dbias.numel());
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention<TensorCores>));
  m.impl("attention_backward", TORCH_BOX(&attention_backward<TensorCores>));
}

}  // namespace megabert
