// Tensor cores and asynchronous copies by PTX, for sm_80 and newer. Tests define the same names for the CPU
// (tests/csrc/cuda_on_cpu/mma.h), so that all other lines of a kernel are the same as for nvcc.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), with g = lane / 4 and t = 2 * (lane % 4); a word
// holds two neighbours, the first in its low half:
//   A [16, 16]: (g, t..), (g + 8, t..), (g, t + 8..), (g + 8, t + 8..)
//   B [16, 8]:  (t.., g), (t + 8.., g)
//   C [16, 8]:  (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)
// So two C fragments side by side, packed in pairs, are an A fragment.
#pragma once

#include "common/device.cuh"

namespace megabert {

// Where a lane points for `load_matrices`: line and column of four 8 x 8 matrices that make up 16 x 16 elements, counted
// down the lines first (`down`), or along the columns first (`along`).
struct LaneAt {
  int line, column;
  __device__ static LaneAt down(int lane) { return {lane % 16, lane / 16 * 8}; }
  __device__ static LaneAt along(int lane) { return {lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8}; }
};

struct alignas(16) Chunk {  // what one load, copy or store moves
  uint32_t word[4];
};

}  // namespace megabert

#if defined(__CUDACC__)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define MEGABERT_NEEDS_SM80(...) __trap()  // compiled for older devices, on which the launch is refused
#else
#define MEGABERT_NEEDS_SM80(...) asm volatile(__VA_ARGS__)
#endif

namespace megabert {

__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  MEGABERT_NEEDS_SM80(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of two-byte elements from shared memory: lane 8 i + j points at line j (16 bytes, aligned) of matrix
// i, and gets of each matrix elements (g, t) and (g, t + 1); transposed: (t, g) and (t + 1, g).
__device__ inline void load_matrices(uint32_t (&to)[4], const void* line) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(line));
  MEGABERT_NEEDS_SM80("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
__device__ inline void load_transposed(uint32_t (&to)[4], const void* line) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(line));
  MEGABERT_NEEDS_SM80("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}

// Starts a copy of Bytes (4 or 16) to shared memory; not `inside`: zeros, and nothing is read. The issuing
// thread can read it after `wait_copies<N>`, which does not wait for copies after the N-th last `commit_copies`; other threads after a
// barrier that follows.
template <int Bytes>
__device__ inline void start_copy(void* shared, const void* global, bool inside) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (Bytes == 16)
    MEGABERT_NEEDS_SM80("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                        :: "r"(at), "l"(global), "r"(inside ? 16 : 0) : "memory");
  else
    MEGABERT_NEEDS_SM80("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                        :: "r"(at), "l"(global), "r"(inside ? 4 : 0) : "memory");
}
__device__ inline void commit_copies() { MEGABERT_NEEDS_SM80("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ inline void wait_copies() {
  MEGABERT_NEEDS_SM80("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ inline int smallest_of_warp(int x) { return __reduce_min_sync(kAllLanes, x); }
__device__ inline int largest_of_warp(int x) { return __reduce_max_sync(kAllLanes, x); }
#else
__device__ inline int smallest_of_warp(int x) { return x; }
__device__ inline int largest_of_warp(int x) { return x; }
#endif

// The shared memory whose size the launch names.
__device__ inline unsigned char* launched_shared() {
  extern __shared__ __align__(16) unsigned char shared[];
  return shared;
}

}  // namespace megabert

#endif
