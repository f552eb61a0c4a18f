// csrc/common/mma.cuh on the CPU: what a warp does together is done when all its 32 fibres are there, each lane's part
// computed from the documented fragments of all lanes. Products and sums are fp32.
#pragma once

#include <algorithm>

#include "cuda.h"

namespace cuda_on_cpu {

inline void check_aligned(const void* p, size_t bytes, const char* message) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail(message);
}

inline float element(uint32_t word, int half, __nv_bfloat16) {
  return __bfloat162float({static_cast<uint16_t>(word >> (16 * half))});
}

struct Operands {
  uint32_t a[4], b[2];
};
struct Address {
  const unsigned char* line;
};

}  // namespace cuda_on_cpu

inline void __syncwarp() { cuda_on_cpu::exchange(0); }
template <class V>
V __shfl_sync(unsigned, V value, int source) {
  return cuda_on_cpu::exchange(value)[source % 32];
}

namespace megabert {

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T type) {
  using namespace cuda_on_cpu;
  const Operands* of = exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int g = lane() / 4, t = lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float left = element(of[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k % 2, type);
      const float right = element(of[column * 4 + k % 8 / 2].b[k / 8], k % 2, type);
      c[i] += left * right;
    }
  }
}

inline void load_matrices(uint32_t (&to)[4], const void* line) {
  using namespace cuda_on_cpu;
  check_aligned(line, 16, "ldmatrix of a line that is not on 16 bytes");
  const Address* of = exchange(Address{static_cast<const unsigned char*>(line)});
  for (int i = 0; i < 4; ++i) memcpy(&to[i], of[8 * i + lane() / 4].line + lane() % 4 * 4, 4);
}
inline void load_transposed(uint32_t (&to)[4], const void* line) {
  using namespace cuda_on_cpu;
  check_aligned(line, 16, "ldmatrix of a line that is not on 16 bytes");
  const Address* of = exchange(Address{static_cast<const unsigned char*>(line)});
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 2; ++half)
      memcpy(reinterpret_cast<char*>(&to[i]) + 2 * half, of[8 * i + lane() % 4 * 2 + half].line + lane() / 4 * 2, 2);
}

inline void do_copy(const cuda_on_cpu::Copy& copy) {
  if (copy.inside) memcpy(copy.to, copy.from, copy.bytes);
  else memset(copy.to, 0, copy.bytes);
}
template <int Bytes>
void start_copy(void* shared, const void* global, bool inside) {
  using namespace cuda_on_cpu;
  check_aligned(shared, Bytes, "cp.async to an unaligned address");
  check_aligned(global, Bytes, "cp.async from an unaligned address");
  const Copy copy{shared, global, Bytes, inside, current->groups};
  if (copies_at_once) do_copy(copy);
  else current->copies.push_back(copy);
}
inline void commit_copies() { ++cuda_on_cpu::current->groups; }
template <int Pending>
void wait_copies() {
  using namespace cuda_on_cpu;
  std::vector<Copy> left;
  for (const Copy& copy : current->copies) {
    if (copy.group + Pending < current->groups) do_copy(copy);
    else left.push_back(copy);
  }
  current->copies.swap(left);
}

inline int smallest_of_warp(int x) {
  const int* all = cuda_on_cpu::exchange(x);
  return *std::min_element(all, all + 32);
}
inline int largest_of_warp(int x) {
  const int* all = cuda_on_cpu::exchange(x);
  return *std::max_element(all, all + 32);
}
inline unsigned char* launched_shared() { return cuda_on_cpu::dynamic_shared; }

}  // namespace megabert
