// As much of CUDA as csrc's kernels use, on the CPU: a fibre for each thread of a block, blocks one after another.
//
// Stricter than a GPU: a barrier or shuffle that not all threads reach, and an access past the end of an argument (arguments
// lie before a page that cannot be touched), end the launch with a message. Fibres run in either order, so that results
// which depend on the order, as they do where a barrier is missing, can be seen.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return {0x7FFF};
  return {static_cast<uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16)};
}
struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float f) { return {static_cast<_Float16>(f)}; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float normcdff(float x) { return static_cast<float>(0.5 * std::erfc(-x * 0.70710678118654752)); }

namespace cuda_on_cpu {

enum class State { ready, at_barrier, at_warp, done };

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
  unsigned x, y;
};

constexpr size_t kStack = 96 << 10;
constexpr int kWarpSize = 32;

inline std::vector<Fibre> fibres;
inline ucontext_t scheduler;
inline Fibre* current = nullptr;
inline std::function<void()> body;
inline float slots[1024];
inline sigjmp_buf on_fault;

inline void yield(State state) {
  current->state = state;
  swapcontext(&current->context, &scheduler);
}

inline void start() {
  body();
  current->state = State::done;
  swapcontext(&current->context, &scheduler);
}

inline void resume(Fibre& fibre) {
  current = &fibre;
  threadIdx = dim3(fibre.x, fibre.y);
  swapcontext(&scheduler, &fibre.context);
}

// Runs one block; returns what went wrong, or an empty string.
inline std::string run_block(bool backwards) {
  const size_t count = static_cast<size_t>(blockDim.x) * blockDim.y;
  if (fibres.size() < count) fibres.resize(count);
  for (size_t i = 0; i < count; ++i) {
    Fibre& f = fibres[i];
    if (!f.stack) f.stack.reset(new char[kStack]);
    f.state = State::ready, f.x = i % blockDim.x, f.y = i / blockDim.x;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = kStack, f.context.uc_link = nullptr;
    makecontext(&f.context, start, 0);
  }
  for (;;) {
    for (size_t i = 0; i < count; ++i) {
      Fibre& f = fibres[backwards ? count - 1 - i : i];
      if (f.state == State::ready) resume(f);
    }
    size_t done = 0, waiting = 0, released = 0;
    for (size_t first = 0; first < count; first += kWarpSize) {
      const size_t last = first + kWarpSize < count ? first + kWarpSize : count;
      size_t here = 0;
      for (size_t i = first; i < last; ++i) {
        done += fibres[i].state == State::done, waiting += fibres[i].state == State::at_barrier;
        here += fibres[i].state == State::at_warp;
      }
      if (here == kWarpSize)
        for (size_t i = first; i < last; ++i) fibres[i].state = State::ready, ++released;
    }
    if (done == count) return "";
    if (waiting == count)
      for (size_t i = 0; i < count; ++i) fibres[i].state = State::ready, ++released;
    if (!released) return "a barrier or shuffle is not reached by all threads";
  }
}

inline void fault(int) { siglongjmp(on_fault, 1); }

// Runs kernel() for every thread of every block.
inline std::string launch(dim3 grid, dim3 block, bool backwards, std::function<void()> kernel) {
  gridDim = grid, blockDim = block, body = kernel;
  if (block.x * block.y > 1024 || block.z != 1 || grid.z != 1) return "not a legal launch";
  struct sigaction act {}, before;
  act.sa_handler = fault;
  act.sa_flags = SA_NODEFER;
  sigaction(SIGSEGV, &act, &before);
  std::string message;
  if (sigsetjmp(on_fault, 1)) {
    message = "memory outside an argument is touched";
  } else {
    const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y;
    for (uint64_t i = 0; i < blocks && message.empty(); ++i) {
      const uint64_t b = backwards ? blocks - 1 - i : i;
      blockIdx = dim3(b % grid.x, b / grid.x);
      message = run_block(backwards);
    }
  }
  sigaction(SIGSEGV, &before, nullptr);
  return message;
}

// Memory that ends where the next page cannot be touched.
inline void* guarded(size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  char* start = static_cast<char*>(mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (start == MAP_FAILED || mprotect(start + whole, page, PROT_NONE)) return nullptr;
  return start + whole - bytes;
}
inline void release(void* p, size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  munmap(static_cast<char*>(p) + bytes - whole, whole + page);
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::yield(cuda_on_cpu::State::at_barrier); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
  using namespace cuda_on_cpu;
  const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
  slots[thread] = value;
  yield(State::at_warp);
  const float other = slots[thread ^ static_cast<unsigned>(distance)];
  yield(State::at_warp);
  return other;
}
