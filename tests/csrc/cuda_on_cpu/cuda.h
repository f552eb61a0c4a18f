// As much of CUDA as csrc's kernels use, on the CPU: a fibre for each thread of a block, blocks one after another.
//
// Stricter than a GPU: a barrier or shuffle that not all threads reach, and an access past the end of an argument or of the
// shared memory that the launch names (both lie before a page that cannot be touched) end the launch with a message. Fibres
// run in either order, so that results which depend on the order, as they do where a barrier is missing, can be seen.
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
#define __launch_bounds__(...)

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
struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// The special function unit's results, each as wrong as it may be: in one direction or the other, by the argument's last bit.
inline float wrong_by(double exact, float argument, double share) {
  uint32_t bits;
  memcpy(&bits, &argument, 4);
  return static_cast<float>(exact * (bits & 1 ? 1 + share : 1 - share));
}
inline float fast_exp2(float x) {
  const float y = wrong_by(std::exp2(static_cast<double>(x)), x, 0x1p-22);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float fast_reciprocal(float x) { return wrong_by(1.0 / x, x, 0x1p-23); }
inline void store_16_bytes(void* to, const uint32_t* word) {
  if (reinterpret_cast<uintptr_t>(to) % 16) raise(SIGSEGV);  // as the device does
  memcpy(to, word, 16);
}

namespace cuda_on_cpu {

enum class State { ready, at_barrier, at_warp, done };

struct Copy {  // asked for and not done yet
  void* to;
  const void* from;
  size_t bytes;
  bool inside;
  unsigned group;
};

// It runs one body after another, so that it is entered once; then _setjmp and _longjmp, which spare swapcontext's call of the
// kernel, take it up where it yielded.
struct Fibre {
  ucontext_t entry;
  jmp_buf yielded;
  std::unique_ptr<char[]> stack;
  State state;
  unsigned x, y;
  unsigned turn;  // of the warp's exchanges
  std::vector<Copy> copies;
  unsigned groups;
};

constexpr size_t kStack = 96 << 10;
constexpr int kWarpSize = 32;

inline std::vector<Fibre> fibres;
inline jmp_buf scheduler;
inline Fibre* current = nullptr;
inline std::function<void()> body;
inline sigjmp_buf on_fault;
inline const char* fault_message;
inline bool copies_at_once;  // or as late as they are waited for: a GPU may do either
inline unsigned char* dynamic_shared = nullptr;
inline size_t dynamic_bytes = 0;

inline void yield(State state) {
  current->state = state;
  if (!_setjmp(current->yielded)) _longjmp(scheduler, 1);
}

// The values that the 32 lanes of this warp give. They lie in two places in turn, so that one wait suffices: when a place is
// written again, all lanes have come to the next exchange and so have read it.
template <class V>
const V* exchange(const V& value) {
  static V places[2][1024];
  const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
  V(&place)[1024] = places[current->turn++ % 2];
  place[thread] = value;
  yield(State::at_warp);
  return place + thread / kWarpSize * kWarpSize;
}
inline unsigned lane() { return (threadIdx.x + threadIdx.y * blockDim.x) % kWarpSize; }

inline void start() {
  for (;;) {
    body();
    yield(State::done);
  }
}

inline void resume(Fibre& fibre) {
  current = &fibre;
  threadIdx = dim3(fibre.x, fibre.y);
  if (_setjmp(scheduler)) return;
  if (fibre.stack) _longjmp(fibre.yielded, 1);
  fibre.stack.reset(new char[kStack]);
  getcontext(&fibre.entry);
  fibre.entry.uc_stack.ss_sp = fibre.stack.get(), fibre.entry.uc_stack.ss_size = kStack, fibre.entry.uc_link = nullptr;
  makecontext(&fibre.entry, start, 0);
  setcontext(&fibre.entry);
}

// Runs one block; returns what went wrong, or an empty string.
inline std::string run_block(bool backwards) {
  const size_t count = static_cast<size_t>(blockDim.x) * blockDim.y;
  if (fibres.size() < count) fibres.resize(count);
  for (size_t i = 0; i < count; ++i) {
    Fibre& f = fibres[i];
    f.state = State::ready, f.x = i % blockDim.x, f.y = i / blockDim.x;
    f.turn = f.groups = 0, f.copies.clear();
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
inline void fail(const char* message) {
  fault_message = message;
  raise(SIGSEGV);
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

// Runs kernel() for every thread of every block, each with `shared` bytes (a multiple of 16) of shared memory, NaN at first.
inline std::string launch(dim3 grid, dim3 block, bool backwards, std::function<void()> kernel, size_t shared = 0) {
  gridDim = grid, blockDim = block, body = kernel, copies_at_once = backwards;
  if (block.x * block.y > 1024 || block.z != 1 || grid.z != 1) return "not a legal launch";
  struct sigaction act {}, before;
  act.sa_handler = fault;
  act.sa_flags = SA_NODEFER;
  sigaction(SIGSEGV, &act, &before);
  std::string message;
  fault_message = "memory outside an argument is touched";
  dynamic_bytes = shared, dynamic_shared = static_cast<unsigned char*>(guarded(shared));
  if (sigsetjmp(on_fault, 1)) {
    message = fault_message;
  } else {
    const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y;
    for (uint64_t i = 0; i < blocks && message.empty(); ++i) {
      const uint64_t b = backwards ? blocks - 1 - i : i;
      blockIdx = dim3(b % grid.x, b / grid.x);
      memset(dynamic_shared, 0xFF, shared);
      message = run_block(backwards);
    }
  }
  if (!message.empty()) fibres.clear();  // some stand within the body
  sigaction(SIGSEGV, &before, nullptr);
  release(dynamic_shared, shared);
  return message;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::yield(cuda_on_cpu::State::at_barrier); }

template <class V>
V __shfl_xor_sync(unsigned, V value, int distance) {
  return cuda_on_cpu::exchange(value)[cuda_on_cpu::lane() ^ static_cast<unsigned>(distance)];
}
