// Small matrix products for attention: C[m, n] (fp32) = or += A[m, k] B[k, n], operands in cache.
//
// k runs in units: two neighbouring bf16 in 32 bits, or one float. A unit (row i, step t) is at a[i * row + t * step];
// B is packed as [steps, ldb] units with n padded to a multiple of W by zeros, and k to a multiple of `grain` units in both. A bf16
// product is one of tiles (cpu/tiles.h) or one dot instruction for each unit if the machine has them, else two multiply-adds.

template <class T>
struct Unit;
template <>
struct Unit<bf16> {
  static constexpr int pack = 2;
#if defined(MEGABERT_AMX)
  static constexpr int grain = kLines;
  typedef Tiles Registers;  // lives while products are computed
#else
  static constexpr int grain = 1;
  struct Registers {};
#endif
  typedef uint32_t type;
  typedef vu vector;
  INLINE vf dot(vf acc, uint32_t a, vu b) {
#if defined(MEGABERT_AVX512BF16)
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
#else
    const vf low = splat(as<float>(a << 16)), high = splat(as<float>(a & 0xFFFF0000u));
    return acc + low * as<vf>(b << 16) + high * as<vf>(b & 0xFFFF0000u);
#endif
  }
};
template <>
struct Unit<float> {
  static constexpr int pack = 1, grain = 1;
  struct Registers {};
  typedef float type;
  typedef vf vector;
  INLINE vf dot(vf acc, float a, vf b) { return acc + a * b; }
};

#if defined(MEGABERT_AVX512)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers accumulate
#else
constexpr int kTileRows = 4, kTileVectors = 2;  // 8 of 16
#endif

template <class T, int M, int N, bool Add>
INLINE void tile(const typename Unit<T>::type* a, int64_t row, int64_t step, const typename Unit<T>::type* b,
                 int64_t ldb, float* c, int64_t ldc, int64_t steps) {
  vf acc[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) acc[i][j] = Add ? load(c + i * ldc + j * W) : vf{};
  for (int64_t t = 0; t < steps; ++t) {
    typename Unit<T>::vector column[N];
    for (int j = 0; j < N; ++j) memcpy(&column[j], b + t * ldb + j * W, sizeof column[j]);
    for (int i = 0; i < M; ++i) {
      const auto unit = a[i * row + t * step];
      for (int j = 0; j < N; ++j) acc[i][j] = Unit<T>::dot(acc[i][j], unit, column[j]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store(c + i * ldc + j * W, acc[i][j]);
}

template <class T, int N, bool Add>
INLINE void tile_rows(int64_t m, const typename Unit<T>::type* a, int64_t row, int64_t step,
                      const typename Unit<T>::type* b, int64_t ldb, float* c, int64_t ldc, int64_t steps) {
  switch (m) {
    case 1: return tile<T, 1, N, Add>(a, row, step, b, ldb, c, ldc, steps);
    case 2: return tile<T, 2, N, Add>(a, row, step, b, ldb, c, ldc, steps);
    case 3: return tile<T, 3, N, Add>(a, row, step, b, ldb, c, ldc, steps);
#if defined(MEGABERT_AVX512)
    case 4: return tile<T, 4, N, Add>(a, row, step, b, ldb, c, ldc, steps);
    case 5: return tile<T, 5, N, Add>(a, row, step, b, ldb, c, ldc, steps);
#endif
    default: return tile<T, kTileRows, N, Add>(a, row, step, b, ldb, c, ldc, steps);
  }
}

// n is a multiple of W; ldc >= n.
template <class T, bool Add>
static __attribute__((noinline)) void multiply(int64_t m, int64_t n, int64_t steps, const typename Unit<T>::type* a,
                                               int64_t row, int64_t step, const typename Unit<T>::type* b, int64_t ldb,
                                               float* c, int64_t ldc) {
#if defined(MEGABERT_AMX)
  if constexpr (Unit<T>::grain > 1) return multiply_tiles<Add>(m, n, steps, a, row, step, b, ldb, c, ldc);
#endif
  for (int64_t j = 0; j < n;) {
    const int64_t vectors = (n - j) / W < kTileVectors ? (n - j) / W : kTileVectors;
    for (int64_t i = 0; i < m; i += kTileRows) {
      const int64_t rows = m - i < kTileRows ? m - i : kTileRows;
      const auto* ai = a + i * row;
      float* cij = c + i * ldc + j;
      switch (vectors) {
        case 1: tile_rows<T, 1, Add>(rows, ai, row, step, b + j, ldb, cij, ldc, steps); break;
#if defined(MEGABERT_AVX512)
        case 2: tile_rows<T, 2, Add>(rows, ai, row, step, b + j, ldb, cij, ldc, steps); break;
        case 3: tile_rows<T, 3, Add>(rows, ai, row, step, b + j, ldb, cij, ldc, steps); break;
#endif
        default: tile_rows<T, kTileVectors, Add>(rows, ai, row, step, b + j, ldb, cij, ldc, steps);
      }
    }
    j += vectors * W;
  }
}
