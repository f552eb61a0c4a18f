// Launches of operations on the GPU: device, torch's current stream, kernels for the tensor's type, error checks.
#pragma once

#include "common/errors.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "common/check.h"
#include "common/device.cuh"

// In torch's CUDA library only. Weak, so that the same binary loads where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

// CUDA release of this build, and the newest one of the driver (0: no driver), for megabert/ops/backend.py.
extern "C" __attribute__((weak)) void megabert_cuda_releases(int* library, int* driver) {
  *library = CUDART_VERSION;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
}

namespace megabert {

// The device of argument `name` of operation `op`, which is current while this lives.
struct Cuda : DeviceTypes<__nv_bfloat16, int> {
  const char* op;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;

  Cuda(const char* op, const char* name, const Tensor& t)
      : op(op), guard((check_cuda(op, name, t), t.get_device_index())) {
    void* current = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream, "this torch has no CUDA");
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": kernel launch failed: ", cudaGetErrorString(error));
}

// The tensor or a contiguous copy, on a 16-byte boundary, as torch allocates; only a slice of a tensor may be unaligned.
inline Tensor aligned(const Cuda& device, const char* name, const Tensor& t) {
  const Tensor d = dense(t);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(d.const_data_ptr()) % 16 == 0, device.op, ": ", name,
                  " is not on a 16-byte boundary");
  return d;
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

// Blocks of a kernel that are resident at once on all processors of the current device, as computed by the runtime from the kernel's
// registers and shared memory: one more would run alone afterwards.
template <class Kernel>
int64_t resident_blocks(Kernel kernel, int threads) {
  int device = 0, processors = 0, on_each = 0;
  STD_TORCH_CHECK(cudaGetDevice(&device) == cudaSuccess &&
                      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
                      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, threads, 0) == cudaSuccess,
                  "CUDA does not report how many blocks of a kernel run at once");
  STD_TORCH_CHECK(on_each > 0, "a block of ", threads, " threads of this kernel does not fit on the device");
  return static_cast<int64_t>(processors) * on_each;
}

// The grid of a kernel with kColumnThreads whose blocks share the rows: all that run at once, no more than there are rows.
template <class Kernel>
dim3 resident_column_grid(Kernel kernel, int64_t rows, int64_t width) {
  const int64_t across = ceil_div(width, kColumnThreads * kGroup), down = resident_blocks(kernel, kColumnThreads) / across;
  return column_grid(down < 1 ? 1 : down < rows ? down : rows, width);
}

// sums = those of the columns of partial [lines, Vectors, width].
template <class T, int Vectors>
void launch_reduce(const Cuda& device, const float* partial, const LineSums<T, Vectors>& sums, int64_t lines,
                   int64_t width) {
  if (!width) return;
  const dim3 threads(kWarp, kLineThreads);
  reduce_lines<T, Vectors><<<static_cast<unsigned>(ceil_div(Vectors * width, kWarp)), threads, 0, device.stream>>>(
      partial, sums, lines, width);
  check_launch(device.op);
}

}  // namespace megabert
