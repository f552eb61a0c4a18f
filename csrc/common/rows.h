// The shapes of thread blocks that hold a row of 1 to 8,192 columns in registers: a warp up to 1,024 columns, 256 threads
// beyond. Used by the launchers and by the tests that run the kernels on the CPU.
#pragma once

#include <cstdint>
#include <type_traits>

namespace megabert {

constexpr int64_t kMaxColumns = 8192;

template <int Threads, int Groups>
struct RowShape {
  static constexpr int threads = Threads, groups = Groups;  // of 8 columns, in each thread
  static constexpr int rows = Threads == 32 ? 4 : 1;        // in a block
  static constexpr int block = threads * rows;
};

// f of the smallest shape that holds `columns` columns.
template <class F>
auto with_row_shape(int64_t columns, F f) {
  if (columns <= 256) return f(RowShape<32, 1>{});
  if (columns <= 512) return f(RowShape<32, 2>{});
  if (columns <= 1024) return f(RowShape<32, 4>{});
  if (columns <= 2048) return f(RowShape<256, 1>{});
  if (columns <= 4096) return f(RowShape<256, 2>{});
  return f(RowShape<256, 4>{});
}

// The same for a kernel whose block processes rows one after another and sums columns: fewer columns in each thread. At most 512
// threads, so that a thread can have 128 of the 65,536 registers.
template <class F>
auto with_block_shape(int64_t columns, F f) {
  if (columns <= 1024) return f(RowShape<128, 1>{});
  if (columns <= 2048) return f(RowShape<256, 1>{});
  if (columns <= 4096) return f(RowShape<512, 1>{});
  return f(RowShape<512, 2>{});
}

// f of std::true_type or std::false_type, for a kernel each.
template <class F>
auto with_bool(bool value, F f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace megabert
