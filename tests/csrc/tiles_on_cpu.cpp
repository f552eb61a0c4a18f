// The kernels for AMX on a machine without it: its instructions as Intel's instruction set reference describes them, TDPBF16PS with
// two sums in fp32 for the even and the odd numbers of a line. Using a tile that is not laid out ends the process.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace emulated {

struct Tile {
  int lines = 0, bytes = 0;
  uint8_t data[16][64];
};
thread_local Tile tiles[8];
thread_local int layouts = 0;

Tile& tile(int i) {
  if (!tiles[i].lines) fprintf(stderr, "tile %d is not laid out\n", i), abort();
  return tiles[i];
}
void configure(const void* from) {
  const uint8_t* p = static_cast<const uint8_t*>(from);
  if (p[0] != 1 || p[1] != 0) fprintf(stderr, "palette %d, first row %d\n", p[0], p[1]), abort();
  for (int i = 0; i < 8; ++i) {
    uint16_t bytes;
    memcpy(&bytes, p + 16 + 2 * i, 2);
    tiles[i].bytes = bytes, tiles[i].lines = p[48 + i];
  }
  ++layouts;
}
void release() {
  for (Tile& t : tiles) t.lines = t.bytes = 0;
}
void load(int i, const void* base, int64_t stride) {
  Tile& t = tile(i);
  for (int line = 0; line < t.lines; ++line) memcpy(t.data[line], static_cast<const char*>(base) + line * stride, t.bytes);
}
void save(int i, void* base, int64_t stride) {
  Tile& t = tile(i);
  for (int line = 0; line < t.lines; ++line) memcpy(static_cast<char*>(base) + line * stride, t.data[line], t.bytes);
}
void zero(int i) { memset(tile(i).data, 0, sizeof tile(i).data); }

float number(const Tile& t, int line, int column) {
  uint16_t half;
  memcpy(&half, t.data[line] + 2 * column, 2);
  const uint32_t bits = half & 0x7F80u ? uint32_t{half} << 16 : uint32_t{half} << 16 & 0x80000000u;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
void add_product(int c, int a, int b) {
  Tile &to = tile(c), &left = tile(a), &right = tile(b);
  if (left.lines != to.lines || right.bytes != to.bytes || left.bytes / 4 != right.lines) abort();
  for (int m = 0; m < to.lines; ++m)
    for (int n = 0; n < to.bytes / 4; ++n) {
      float sums[2] = {};
      for (int k = 0; k < right.lines; ++k)
        for (int h = 0; h < 2; ++h) sums[h] = std::fma(number(left, m, 2 * k + h), number(right, k, 2 * n + h), sums[h]);
      float value;
      memcpy(&value, to.data[m] + 4 * n, 4);
      value += sums[0] + sums[1];
      memcpy(to.data[m] + 4 * n, &value, 4);
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::configure
#define _tile_release emulated::release
#define _tile_loadd emulated::load
#define _tile_stored emulated::save
#define _tile_zero emulated::zero
#define _tile_dpbf16ps emulated::add_product

#include "cpu/kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define MEGABERT_AVX512 1
#define MEGABERT_AMX 1
namespace megabert {
#include "cpu/simd.h"
#include "cpu/tiles.h"
#include "cpu/gemm.h"
#include "attention/kernel.h"
}  // namespace megabert

using megabert::bf16;

extern "C" int attention(const bf16* qkv, const int32_t* start, const int32_t* end, bf16* context, float* lse,
                         const bf16* grad, bf16* dqkv, float* sums, int64_t batch, int64_t tokens, int64_t heads,
                         int64_t size, int64_t seed, int64_t stream, double p) {
  megabert::Attention<bf16> args{};
  args.qkv = qkv, args.start = start, args.end = end, args.context = context, args.lse = lse;
  args.tokens = tokens, args.heads = heads, args.size = size;
  args.grad = grad, args.dqkv = dqkv, args.sums = sums;
  megabert::attention<bf16>(args, megabert::Dropout::make(seed, stream, p), {0, batch, 0, heads});
  return emulated::layouts;
}
