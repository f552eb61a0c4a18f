// How an operation reaches the GPU: its device, torch's current stream, kernels for the tensor's type, checked launches.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "common/check.h"
#include "common/device.cuh"

// In torch's CUDA library only. Weak, so that the same binary loads where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace megabert {

// Makes the tensor's device current while it lives.
struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;

  explicit OnDevice(const Tensor& t) : guard(t.get_device_index()) {
    void* current = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream, "this torch has no CUDA");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": kernel launch failed: ", cudaGetErrorString(error));
}

// Calls f with a value of the element type.
template <class F>
void with_type(ScalarType type, F f) {
  if (type == ScalarType::BFloat16) f(__nv_bfloat16{});
  else if (type == ScalarType::Half) f(__half{});
  else f(float{});
}

// Whether all rows of these contiguous tensors can be read in groups of 8 columns, 16 bytes at a time.
template <class... P>
bool whole_groups(int64_t width, const P*... pointers) {
  return width % kGroup == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The grid of a kernel with kColumnThreads: `blocks` of them share the rows.
inline dim3 column_grid(int64_t blocks, int64_t width) {
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(width, kColumnThreads * kGroup)));
}

template <class T>
void reduce_lines_on(cudaStream_t stream, const float* partial, T* result, int64_t lines, int64_t stride, int64_t width,
                     const char* op) {
  if (!width) return;
  const dim3 threads(kWarp, kLineThreads);
  reduce_lines<T><<<static_cast<unsigned>(ceil_div(width, kWarp)), threads, 0, stream>>>(
      partial, result, lines, stride, width);
  check_launch(op);
}

// Blocks that keep every processor of the current device busy, no more than there is work.
inline int64_t blocks_for(int64_t work, int64_t on_each) {
  int device = 0, processors = 1;
  STD_TORCH_CHECK(cudaGetDevice(&device) == cudaSuccess &&
                      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess,
                  "CUDA does not tell its number of processors");
  return work < processors * on_each ? work : processors * on_each;
}

}  // namespace megabert
