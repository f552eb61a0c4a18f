// Matrix products of bf16 in AMX tiles: a tile is 16 lines of 64 bytes, and one instruction adds the product of 16 x 32 by 32 x 16
// numbers to 16 x 16 in fp32. Operands are packed as in cpu/gemm.h, whose units are the tiles' own; numbers below 2^-126 count as zero.

constexpr int kLines = 16;  // of a tile; as many units in each

// The tiles of this thread, from construction to destruction: other libraries lay them out in their ways.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t lines[16] = {kLines, kLines, kLines, kLines, kLines, kLines, kLines, kLines};
    } layout;
    asm volatile("" ::"m"(layout));
    _tile_loadconfig(&layout);
  }
  ~Tiles() { _tile_release(); }
};

// The compiler does not see that the instructions for tiles read and write memory.
INLINE void memory_in_order() { asm volatile("" ::: "memory"); }

// C[rows, 16 N], rows in 16 (M - 1) + [1, 16]. Of A and C whole tiles are read, of C only its rows are written.
template <int M, int N, bool Add>
INLINE void tile_product(int64_t rows, int64_t steps, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                         float* c, int64_t ldc) {
  alignas(64) float rest[kLines * 2 * kLines];
  const int64_t left = rows - (M - 1) * kLines;
  float *last = c + (M - 1) * kLines * ldc, *lower = left < kLines ? rest : last;
  const int64_t ldl = left < kLines ? N * kLines : ldc;
  const auto copy_rest = [&](float* to, int64_t ldt, const float* from, int64_t ldf) {
    for (int64_t i = 0; i < left; ++i) memcpy(to + i * ldt, from + i * ldf, sizeof(float) * N * kLines);
  };
  if (Add && left < kLines) copy_rest(rest, N * kLines, last, ldc);
  memory_in_order();
  // tiles 0 to 3: C, line by line; 4 and 5: A; 6 and 7: B
  if (Add) {
    if (M == 2) _tile_loadd(0, c, ldc * 4);
    if (M == 2 && N == 2) _tile_loadd(1, c + kLines, ldc * 4);
    _tile_loadd(2, lower, ldl * 4);
    if (N == 2) _tile_loadd(3, lower + kLines, ldl * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t t = 0; t < steps; t += kLines) {
    _tile_loadd(6, b + t * ldb, ldb * 4);
    if (N == 2) _tile_loadd(7, b + t * ldb + kLines, ldb * 4);
    if (M == 2) _tile_loadd(4, a + t, lda * 4);
    if (M == 2) _tile_dpbf16ps(0, 4, 6);
    if (M == 2 && N == 2) _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + (M - 1) * kLines * lda + t, lda * 4);
    _tile_dpbf16ps(2, 5, 6);
    if (N == 2) _tile_dpbf16ps(3, 5, 7);
  }
  if (M == 2) _tile_stored(0, c, ldc * 4);
  if (M == 2 && N == 2) _tile_stored(1, c + kLines, ldc * 4);
  _tile_stored(2, lower, ldl * 4);
  if (N == 2) _tile_stored(3, lower + kLines, ldl * 4);
  memory_in_order();
  if (left < kLines) copy_rest(last, ldc, rest, N * kLines);
}

// `out` [16, 16] = the transpose of x's first 16 columns and lines.
INLINE void transpose(const uint32_t* x, int64_t ldx, uint32_t* out, int64_t ldo) {
  __m512i line[kLines], next[kLines];
  for (int i = 0; i < kLines; ++i) line[i] = _mm512_loadu_si512(x + i * ldx);
  for (int i = 0; i < kLines; i += 2) {  // pairs of 32 bits, then of 64
    next[i] = _mm512_unpacklo_epi32(line[i], line[i + 1]), next[i + 1] = _mm512_unpackhi_epi32(line[i], line[i + 1]);
  }
  for (int i = 0; i < kLines; i += 4)
    for (int h = 0; h < 2; ++h) {
      line[i + 2 * h] = _mm512_unpacklo_epi64(next[i + h], next[i + h + 2]);
      line[i + 2 * h + 1] = _mm512_unpackhi_epi64(next[i + h], next[i + h + 2]);
    }
  // line[4 q + r]: columns r, 4 + r, 8 + r, 12 + r of lines 4 q to 4 q + 3; now quarters of 128 bits
  for (int r = 0; r < 4; ++r)
    for (int h = 0; h < 2; ++h) {
      next[4 * r + h] = _mm512_shuffle_i32x4(line[r + 8 * h], line[4 + r + 8 * h], 0x88);
      next[4 * r + 2 + h] = _mm512_shuffle_i32x4(line[r + 8 * h], line[4 + r + 8 * h], 0xDD);
    }
  for (int r = 0; r < 4; ++r)
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i low = next[4 * r + 2 * odd], high = next[4 * r + 2 * odd + 1];
      _mm512_storeu_si512(out + (r + 4 * odd) * ldo, _mm512_shuffle_i32x4(low, high, 0x88));
      _mm512_storeu_si512(out + (r + 4 * odd + 8) * ldo, _mm512_shuffle_i32x4(low, high, 0xDD));
    }
}

// The arguments of `multiply` in cpu/gemm.h for A's units in lines; n and steps are multiples of 16.
template <bool Add>
INLINE void multiply_lines(int64_t m, int64_t n, int64_t steps, const uint32_t* a, int64_t lda, const uint32_t* b,
                           int64_t ldb, float* c, int64_t ldc) {
  for (int64_t j = 0; j < n; j += 2 * kLines)
    for (int64_t i = 0; i < m; i += 2 * kLines) {
      const int64_t rows = m - i < 2 * kLines ? m - i : 2 * kLines;
      const bool two = rows > kLines, wide = n - j > kLines;
      const auto product = two ? (wide ? tile_product<2, 2, Add> : tile_product<2, 1, Add>)
                               : (wide ? tile_product<1, 2, Add> : tile_product<1, 1, Add>);
      product(rows, steps, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
    }
}

// As `multiply` in cpu/gemm.h. Where A's units are in columns (row == 1; at most 32 of a line), whole tiles of it are read and transposed.
template <bool Add>
INLINE void multiply_tiles(int64_t m, int64_t n, int64_t steps, const uint32_t* a, int64_t row, int64_t step,
                           const uint32_t* b, int64_t ldb, float* c, int64_t ldc) {
  if (step == 1) return multiply_lines<Add>(m, n, steps, a, row, b, ldb, c, ldc);
  constexpr int64_t kMost = 2 * kLines;
  alignas(64) uint32_t lines[2 * kLines * kMost];
  for (int64_t i = 0; i < m; i += 2 * kLines) {
    const int64_t rows = m - i < 2 * kLines ? m - i : 2 * kLines;
    for (int64_t h = 0; h < rows; h += kLines)
      for (int64_t t = 0; t < steps; t += kLines)
        transpose(a + i + h + t * step, step, lines + h * kMost + t, kMost);
    multiply_lines<Add>(rows, n, steps, lines, kMost, b, ldb, c + i * ldc, ldc);
  }
}
