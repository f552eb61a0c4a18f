// One dropout mask for every device: whether element (row, column) of a tensor is kept depends only on the seed, the
// stream number of the operation, the row and the column, not on threads, blocks or vector width.
//
// Philox4x32-10 (Salmon et al. 2011). One call gives 128 bits = 16 bits for each of 8 neighbouring columns:
//   counter = (column / 8, low half of row, high half of row, stream), key = (low, high half of the seed),
//   element column % 8 takes half (column % 2) of word (column % 8) / 2, and is kept when that is >= threshold.
// A batch that is part of a larger one has the mask of its place there: rows are counted from the first of the larger one.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MEGABERT_HOST_DEVICE __host__ __device__
#else
#define MEGABERT_HOST_DEVICE
#endif

namespace megabert {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // key increments
constexpr int kPhiloxRounds = 10;

struct Philox {
  uint32_t word[4];
};

MEGABERT_HOST_DEVICE inline uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;  // one instruction; for a product of two 64-bit numbers the compiler also adds a zero
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

MEGABERT_HOST_DEVICE inline Philox philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = wide_product(kPhiloxM0, c0), p1 = wide_product(kPhiloxM1, c2);
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = static_cast<uint32_t>(p1), c2 = n2, c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0, k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// A dropout probability in 16 bits: elements are dropped with probability threshold / 65536, the nearest to p, and kept ones are
// scaled by the exact inverse of the kept share.
struct Dropout {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint32_t threshold = 0;  // 0: no dropout
  float scale = 1.0f;
  int64_t lines = 0;   // mask rows of a row of the batch, where the seed is followed by the batch's place; otherwise 0
  uint64_t first = 0;  // mask row of the batch's first

  MEGABERT_HOST_DEVICE static Dropout make(uint64_t seed, int64_t stream, double p) {
    Dropout d;
    d.seed = seed, d.stream = static_cast<uint32_t>(stream), d.threshold = static_cast<uint32_t>(p * 65536.0 + 0.5);
    d.scale = static_cast<float>(65536.0 / (65536.0 - d.threshold));
    return d;
  }

  // `given`: the seed and, where `lines` is not 0, how many rows of the larger batch come before this one.
  MEGABERT_HOST_DEVICE void read(const int64_t* given) {
    seed = static_cast<uint64_t>(given[0]);
    if (lines) first = static_cast<uint64_t>(given[1]) * static_cast<uint64_t>(lines);
  }

  // The numbers of columns [8 * group, 8 * group + 8) of a row of the batch, and whether column i of them is kept.
  MEGABERT_HOST_DEVICE Philox draw(uint64_t row, uint32_t group) const {
    row += first;
    return philox(seed, group, static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), stream);
  }
  MEGABERT_HOST_DEVICE bool keeps(const Philox& drawn, int i) const {
    return ((drawn.word[i / 2] >> (16 * (i % 2))) & 0xFFFFu) >= threshold;
  }

  // Bit i: whether column 8 * group + i of the row is kept.
  MEGABERT_HOST_DEVICE uint32_t keep8(uint64_t row, uint32_t group) const {
    const Philox drawn = draw(row, group);
    uint32_t bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(keeps(drawn, i)) << i;
    return bits;
  }
};

}  // namespace megabert
