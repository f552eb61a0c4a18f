// Vectors of W floats and their operations, for the instruction set of the compilation.
// Included inside a namespace of that instruction set; compiler vector types keep it portable (GCC, Clang; x86, Arm, ...),
// intrinsics appear only where the compiler does not find the instruction.

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

#if defined(MEGABERT_AVX512)
constexpr int W = 16;
#elif defined(MEGABERT_AVX2)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));

INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat_u(uint32_t x) { return x - vu{}; }
INLINE vi splat_i(int32_t x) { return x - vi{}; }

template <class To, class From>
INLINE To as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

INLINE vi lanes() {
  vi v{};
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

INLINE vf widen(vh x) { return as<vf>(__builtin_convertvector(x, vu) << 16); }

INLINE vh narrow(vf x) {  // round to nearest even; NaN stays NaN
#if defined(MEGABERT_AVX512BF16)
  return as<vh>(_mm512_cvtneps_pbh(x));
#else
  const vu u = as<vu>(x);
  const vu rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return __builtin_convertvector((u & 0x7FFFFFFFu) > 0x7F800000u ? (u >> 16) | 0x40u : rounded, vh);
#endif
}

// Loads and stores of n <= W elements; missing lanes are zero. n == W is the fast way.
template <class V, class E>
INLINE V load_lanes(const E* p, int64_t n) {
  V v{};
  if (n >= W) memcpy(&v, p, sizeof v);
  else memcpy(&v, p, sizeof(E) * n);
  return v;
}
template <class V, class E>
INLINE void store_lanes(E* p, V v, int64_t n) {
  if (n >= W) memcpy(p, &v, sizeof v);
  else memcpy(p, &v, sizeof(E) * n);
}
INLINE vf load(const float* p, int64_t n = W) { return load_lanes<vf>(p, n); }
INLINE vf load(const bf16* p, int64_t n = W) { return widen(load_lanes<vh>(p, n)); }
INLINE void store(float* p, vf v, int64_t n = W) { store_lanes(p, v, n); }
INLINE void store(bf16* p, vf v, int64_t n = W) { store_lanes(p, narrow(v), n); }
INLINE vf rounded(vf x, const float*) { return x; }  // rounded like by a store to that type and a load
INLINE vf rounded(vf x, const bf16*) { return widen(narrow(x)); }

INLINE float total(vf v) {
#if defined(MEGABERT_AVX512)
  return _mm512_reduce_add_ps(v);
#else
  float line[W];
  memcpy(line, &v, sizeof v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) line[i] += line[i + half];
  return line[0];
#endif
}
INLINE float largest(vf v) {
#if defined(MEGABERT_AVX512)
  return _mm512_reduce_max_ps(v);
#else
  float line[W];
  memcpy(line, &v, sizeof v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) line[i] = line[i] > line[i + half] ? line[i] : line[i + half];
  return line[0];
#endif
}
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
INLINE vf magnitude(vf x) { return as<vf>(as<vu>(x) & 0x7FFFFFFFu); }

// exp(x) = 2^n * e^r, |r| <= ln2 / 2, e^r by a minimax polynomial (relative error 3e-9 before rounding).
// Below -87.3 the result is 0, so that exp(-inf) = 0; NaN stays NaN.
INLINE vf exp(vf x) {
  const vf low = splat(-87.3f), high = splat(88.7f);
  const vf y = x < low ? low : (x > high ? high : x);
  const vf shifted = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer part lands in the low bits
  const vf n = shifted - 12582912.0f;
  const vf r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = r * 1.38146e-3f + 8.3687166e-3f;
  p = p * r + 4.16683890e-2f;
  p = p * r + 1.66665211e-1f;
  p = p * r + 4.99999940e-1f;
  p = p * r * r + (r + 1.0f);
  const vf scale = as<vf>((as<vu>(shifted) << 23) + (127u << 23));
  return x < low ? vf{} : p * scale;
}

// 2^x for x <= 1 or so, as in softmax, cheaper than exp: relative error 1e-7; 0 below -100, which is negligible for a probability: a
// tiny value instead would make denormal products for masked keys, which take a hundred times as long. NaN stays NaN.
INLINE vf exp2_of_score(vf x) {
  const vf shifted = x + 12582912.0f;
  const vf r = x - (shifted - 12582912.0f);
  vf p = r * 1.326472731e-3f + 9.671512991e-3f;
  p = p * r + 5.550733581e-2f;
  p = p * r + 0.2402224243f;
  p = p * r + 0.6931470037f;
  p = p * r + 1.0f;
  return x < -100.0f ? vf{} : as<vf>(as<vu>(p) + (as<vu>(shifted) << 23));
}

// Standard normal distribution: cdf(z), and density(z) * sqrt(2 pi) = exp(-z^2 / 2).
// cdf(-u) = exp(-u^2 / 2) * t * P(t), t = 1 / (1 + 0.26 u): a minimax fit, relative error 3e-7 for all u >= 0.
struct Normal {
  vf cdf, bell;
};
INLINE Normal normal(vf z) {
  const vf u = magnitude(z);
  const vf t = 1.0f / (u * 0.26f + 1.0f);
  vf p = t * 0.030504941940307617f - 0.1528290957212448f;
  p = p * t + 0.25149184465408325f;
  p = p * t - 0.1509496122598648f;
  p = p * t + 0.16094829142093658f;
  p = p * t + 0.05102750286459923f;
  p = p * t + 0.10303030163049698f;
  p = p * t + 0.10301674157381058f;
  p = p * t + 0.10375905781984329f;
  const vf bell = exp(z * z * -0.5f);
  const vf tail = bell * p * t;
  return {z < 0.0f ? tail : 1.0f - tail, bell};
}

#if !defined(MEGABERT_AVX512)
INLINE vu high_product(vu a, uint32_t b) {
#if defined(MEGABERT_AVX2)
  const __m256i x = (__m256i)a, y = _mm256_set1_epi32(static_cast<int>(b));
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  return (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  vu r{};
  for (int i = 0; i < W; ++i) r[i] = static_cast<uint32_t>((static_cast<uint64_t>(a[i]) * b) >> 32);
  return r;
#endif
}
#endif

// Words of Philox (common/philox.h) for the counters group, group + 1, … of a row of a dropout mask.
struct Words {
  vu word[4];
};
INLINE Words philox_words(const Dropout& d, uint64_t row, uint32_t group) {
  uint32_t k0 = static_cast<uint32_t>(d.seed), k1 = static_cast<uint32_t>(d.seed >> 32);
#if defined(MEGABERT_AVX512)
  // 32 bits of each counter in 64, whose upper halves nothing reads: a product's are both of the results
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  __m512i c[4][2];
  for (int half = 0; half < 2; ++half) {
    c[0][half] = _mm512_add_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(group + 8u * half));
    c[1][half] = _mm512_set1_epi64(static_cast<int64_t>(row));
    c[2][half] = _mm512_set1_epi64(static_cast<int64_t>(row >> 32));
    c[3][half] = _mm512_set1_epi64(d.stream);
  }
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
    const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
    for (int half = 0; half < 2; ++half) {
      const __m512i p0 = _mm512_mul_epu32(c[0][half], m0), p1 = _mm512_mul_epu32(c[2][half], m1);
      c[0][half] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c[1][half], key0, 0x96);  // exclusive or
      c[2][half] = _mm512_ternarylogic_epi64(_mm512_shuffle_epi32(p0, _MM_PERM_DDBB), c[3][half], key1, 0x96);
      c[1][half] = p1, c[3][half] = p0;
    }
  }
  Words words;
  for (int i = 0; i < 4; ++i) {
    const __m512i first = _mm512_castsi256_si512(_mm512_cvtepi64_epi32(c[i][0]));
    words.word[i] = (vu)_mm512_inserti64x4(first, _mm512_cvtepi64_epi32(c[i][1]), 1);
  }
  return words;
#else
  vu c0 = as<vu>(lanes()) + group, c1 = splat_u(static_cast<uint32_t>(row));
  vu c2 = splat_u(static_cast<uint32_t>(row >> 32)), c3 = splat_u(d.stream);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
    const vu n0 = high_product(c2, kPhiloxM1) ^ c1 ^ k0, n2 = high_product(c0, kPhiloxM0) ^ c3 ^ k1;
    c1 = c2 * kPhiloxM1, c3 = c0 * kPhiloxM0, c0 = n0, c2 = n2;
  }
  return {{c0, c1, c2, c3}};
#endif
}

// Keep bits of columns [8 * group, 8 * (group + groups)) of one row, a byte for 8 columns (Dropout::keep8).
// Writes a multiple of W bytes.
INLINE void keep_bits(const Dropout& d, uint64_t row, uint32_t group, int64_t groups, uint8_t* out) {
  row += d.first;
  for (int64_t g = 0; g < groups; g += W) {
    const Words drawn = philox_words(d, row, group + static_cast<uint32_t>(g));
    vu bits{};
    for (int i = 0; i < 8; ++i) {
      const vu value = i % 2 ? drawn.word[i / 2] >> 16 : drawn.word[i / 2] & 0xFFFFu;
      bits |= as<vu>(value >= d.threshold) & (1u << i);
    }
    const vb bytes = __builtin_convertvector(bits, vb);
    memcpy(out + g, &bytes, sizeof bytes);
  }
}

// x where the bit of the column is set, else zero. Lane i belongs to column + i, counted from the first of `bits`, of which
// four bytes from the column's on are read.
INLINE vf keep(vf x, const uint8_t* bits, int64_t column) {
  uint32_t word;
  memcpy(&word, bits + column / 8, 4);
  word >>= column % 8;
#if defined(MEGABERT_AVX512)
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(word), x);
#else
  return as<vf>(as<vu>(x) & as<vu>(((splat_u(word) >> as<vu>(lanes())) & 1u) != 0u));
#endif
}

// Memory of one thread, kept between calls.
struct Scratch {
  char* data = nullptr;
  size_t size = 0, used = 0;
  ~Scratch() { free(data); }
  void reset(size_t bytes) {
    if (bytes > size) {
      free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = static_cast<char*>(aligned_alloc(64, size));
      if (!data) size = 0, throw std::bad_alloc();
    }
    used = 0;
  }
  template <class E>
  E* take(int64_t count) {
    E* p = reinterpret_cast<E*>(data + used);
    used += (count * sizeof(E) + 63) / 64 * 64;
    return p;
  }
};
