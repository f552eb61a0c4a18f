// Attention of one head over one row of packed sequences, in fp32 except for the products' operands.
//
// A run is a sequence of tokens (or the pads) whose key ranges [start, end) begin at the same key, or, with a window, each not before
// the previous one's and before the token itself; all work is inside a run. Bounds may differ (causal model, window): a block of
// queries uses the keys from its first start, rounded down to a whole vector, to its last end, and keys outside of a query's range
// are masked. A long run of windows is cut, so that its packed keys stay in cache. Scores of a block of queries and keys stay in cache;
// the whole matrix of probabilities is never in memory, backward recomputes it from the saved log-sum-exp. Operands are packed as in
// cpu/gemm.h:
//   columns(X): X^T for C = A X^T      pairs(X): X for C = A X      rows(X): X as left operand

// Units of n elements. And n in whole lines of units: padded<float> in vectors, which is what is computed of a line of scores;
// padded<T> as far as a sum over it reads.
template <class T>
INLINE int64_t units(int64_t n) {
  constexpr int64_t grain = Unit<T>::pack * Unit<T>::grain;
  return (n + grain - 1) / grain * Unit<T>::grain;
}
template <class T>
constexpr int64_t kGrain = Unit<T>::grain > 1 ? Unit<T>::pack * Unit<T>::grain : W;
template <class T>
INLINE int64_t padded(int64_t n) { return (n + kGrain<T> - 1) / kGrain<T> * kGrain<T>; }
// Distance of lines of `n` elements: an odd number of vectors, since lines a power of two apart share a few sets of the cache.
template <class T>
INLINE int64_t apart(int64_t n) { return padded<T>(n) | kGrain<T>; }

template <class T>
static void pack_rows(const T* x, int64_t ld, int64_t count, int64_t width, typename Unit<T>::type* out) {
  const int64_t steps = units<T>(width), whole = width / Unit<T>::pack;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t t = whole; t < steps; ++t) out[i * steps + t] = 0;
    memcpy(out + i * steps, x + i * ld, sizeof(T) * width);
  }
}

template <class T>
static void pack_columns(const T* x, int64_t ld, int64_t count, int64_t width, typename Unit<T>::type* out,
                         int64_t ldb) {
  typedef typename Unit<T>::type U;
  constexpr int pack = Unit<T>::pack;
  const int64_t whole = width / pack;
  for (int64_t j = 0; j < ldb; j += W) {
    const int64_t n = count - j < W ? count - j : W;
    for (int64_t t = 0; t < units<T>(width); ++t) {
      U line[W] = {};
      const T* from = x + j * ld + t * pack;
      if (t < whole)
        for (int64_t i = 0; i < n; ++i) memcpy(&line[i], from + i * ld, sizeof(U));
      else if (t * pack < width)
        for (int64_t i = 0; i < n; ++i) memcpy(&line[i], from + i * ld, sizeof(T));
      memcpy(out + t * ldb + j, line, sizeof line);
    }
  }
}

INLINE vu interleave(vf even, vf odd) {  // bf16 pairs
#if defined(MEGABERT_AVX512BF16)
  // low half: 16 rounded of `even`, high half: 16 of `odd`; one permutation brings neighbours together
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vu)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
#else
  return __builtin_convertvector(narrow(even), vu) | (__builtin_convertvector(narrow(odd), vu) << 16);
#endif
}
INLINE void store_units(uint32_t* out, const vf (&line)[2]) {
  const vu unit = interleave(line[0], line[1]);
  memcpy(out, &unit, sizeof unit);
}
INLINE void store_units(float* out, const vf (&line)[1]) { store(out, line[0]); }

template <class T>
static void pack_pairs(const T* x, int64_t ld, int64_t count, int64_t width, typename Unit<T>::type* out, int64_t ldb) {
  constexpr int pack = Unit<T>::pack;
  for (int64_t i = 0; i < units<T>(count) * pack; i += pack)
    for (int64_t j = 0; j < ldb; j += W) {
      vf line[pack];
      for (int h = 0; h < pack; ++h) line[h] = i + h < count ? load(x + (i + h) * ld + j, width - j) : vf{};
      store_units(out + i / pack * ldb + j, line);
    }
}

constexpr float kLog2e = 1.44269504f;

// Prefetches a token's data of the next task (the next head, or the first of the next row): these short slices are far apart, and
// hardware does not prefetch them.
template <class T>
struct NextTask {
  const Attention<T>& a;
  int64_t row, head, last_row;

  NextTask(const Attention<T>& a, int64_t row, int64_t head, const Heads& part)
      : a(a),
        row(head + 1 < part.last_head ? row : row + 1),
        head(head + 1 < part.last_head ? head + 1 : part.head),
        last_row(part.last_row) {}
  INLINE_MEMBER void slice(const T* p) const {
    for (int64_t c = 0; c < a.size; c += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + c, 0, 2);
  }
  INLINE_MEMBER void fetch(int64_t token) const {
    if (row >= last_row) return;
    const int64_t at = row * a.tokens + token, width = a.heads * a.size;
    for (int part = 0; part < 3; ++part) slice(a.qkv + (at * 3 + part) * width + head * a.size);
    if (!a.grad) return;
    slice(a.grad + at * width + head * a.size);
    slice(a.context + at * width + head * a.size);
  }
};

// Masks the scores outside of keys [first, last) in a line of `width` (a multiple of W).
INLINE void hide_outside(float* scores, int64_t first, int64_t last, int64_t width) {
  const auto hide = [&](int64_t j) {
    const vi key = lanes() + splat_i(j);
    const vi seen = (key >= splat_i(first)) & (key < splat_i(last));
    store(scores + j, seen ? load(scores + j) : splat(-INFINITY));
  };
  for (int64_t j = 0; j < width && j < first; j += W) hide(j);
  for (int64_t j = last > 0 ? last / W * W : 0; j < width; j += W) hide(j);
}

// Largest number of keys of the queries [i, i + rows) of a run that begins at key `first`.
INLINE int64_t most_keys(const int32_t* end, int64_t i, int64_t rows, int64_t first) {
  int32_t last = end[i];
  for (int64_t r = 1; r < rows; ++r) last = end[i + r] > last ? end[i + r] : last;
  return last - first;
}

// Calls f(first query, queries, first key, most keys) for each run; either all of its queries have keys or none, and their first
// keys are ascending.
template <class F>
INLINE void for_each_run(const int32_t* start, const int32_t* end, int64_t tokens, F f) {
  constexpr int64_t kCut = 576;  // queries of a run whose first keys differ; a multiple of the blocks of both passes
  for (int64_t i = 0; i < tokens;) {
    int64_t next = i + 1;
    const bool some = end[i] > start[i];
    const auto follows = [&](int64_t j) {
      return start[j] == start[j - 1] || (some && start[j] > start[j - 1] && start[j] < j);
    };
    const auto fits = [&](int64_t j) { return start[j] == start[i] || j - i < kCut; };
    while (next < tokens && follows(next) && (end[next] > start[next]) == some && fits(next)) ++next;
    f(i, next - i, static_cast<int64_t>(start[i]), most_keys(end, i, next - i, start[i]));
    i = next;
  }
}

// Queries at once: with tiles enough of them that a sum over them is worth reading it from memory and writing it back.
template <class T>
constexpr int64_t kQueries = Unit<T>::grain > 1 ? 64 : 24;

// Keys at once; their scores are rescaled when a later block has a larger one.
constexpr int64_t kKeys = 1024;

template <class T>
static void attend(const Attention<T>& a, const Dropout& dropout, int64_t row, int64_t head, const Heads& part) {
  typedef typename Unit<T>::type U;
  constexpr int64_t kBlock = kQueries<T>;
  static thread_local Scratch scratch;
  const int64_t tokens = a.tokens, size = a.size, ld = 3 * a.heads * size, most = apart<T>(tokens);
  const int64_t steps = units<T>(size), lds = padded<float>(size), ldw = apart<T>(tokens < kKeys ? tokens : kKeys);
  scratch.reset(sizeof(U) * (steps * most + units<T>(tokens) * lds + kBlock * (steps + ldw)) +
                sizeof(float) * kBlock * (ldw + lds) + tokens / 8 + 4 * W + 1024);
  U* key_columns = scratch.take<U>(steps * most);
  U* value_pairs = scratch.take<U>(units<T>(tokens) * lds);
  U* query_rows = scratch.take<U>(kBlock * steps);
  T* weights = reinterpret_cast<T*>(scratch.take<U>(kBlock * ldw));
  float* scores = scratch.take<float>(kBlock * ldw);
  float* out = scratch.take<float>(kBlock * lds);
  uint8_t* bits = scratch.take<uint8_t>(tokens / 8 + 2 * W + 8);
  float top[kBlock], whole[kBlock];  // of a query: largest score so far, sum of the probabilities before division by it
  const T* query = a.qkv + row * tokens * ld + head * size;
  const T *key = query + a.heads * size, *value = key + a.heads * size;
  T* context = a.context + row * tokens * a.heads * size + head * size;
  float* lse = a.lse + (row * a.heads + head) * tokens;
  const uint64_t line = (static_cast<uint64_t>(row) * a.heads + head) * tokens;  // of the dropout mask
  const NextTask<T> next(a, row, head, part);
  const float scale = kLog2e / std::sqrt(static_cast<float>(size));  // scores are in powers of two from here on
  const int32_t *start = a.start + row * tokens, *end = a.end + row * tokens;

  for_each_run(start, end, tokens, [&](int64_t i0, int64_t queries, int64_t j0, int64_t keys) {
    if (keys <= 0) {  // nothing to attend to: zeros
      for (int64_t i = i0; i < i0 + queries; ++i) {
        memset(context + i * a.heads * size, 0, sizeof(T) * size);
        lse[i] = -INFINITY;
      }
      return;
    }
    const int64_t ldk = apart<T>(keys);
    pack_columns(key + j0 * ld, ld, keys, size, key_columns, ldk);
    pack_pairs(value + j0 * ld, ld, keys, size, value_pairs, lds);
    for (int64_t i = i0; i < i0 + queries; i += kBlock) {
      const int64_t rows = i0 + queries - i < kBlock ? i0 + queries - i : kBlock;
      const int64_t skipped = (start[i] - j0) / kGrain<T> * kGrain<T>, seen = most_keys(end, i, rows, j0);
      pack_rows(query + i * ld, ld, rows, size, query_rows);
      for (int64_t r = 0; r < rows; ++r) top[r] = -INFINITY, whole[r] = 0;
      for (int64_t k = skipped; k < seen; k += kKeys) {
        const int64_t count = seen - k < kKeys ? seen - k : kKeys, width = padded<float>(count), first = j0 + k;
        multiply<T, false>(rows, width, steps, query_rows, steps, 1, key_columns + k, ldk, scores, ldw);
        for (int64_t r = 0; r < rows; ++r) {
          float* s = scores + r * ldw;
          if (k == skipped) next.fetch(i + r);
          hide_outside(s, start[i + r] - first, end[i + r] - first, width);
          vf most_v = load(s);
          for (int64_t j = W; j < width; j += W) most_v = larger(load(s + j), most_v);
          const float before = top[r], largest_here = largest(most_v) * scale;
          top[r] = before > largest_here ? before : largest_here;
          if (top[r] == -INFINITY) {
            memset(weights + r * ldw, 0, sizeof(T) * padded<T>(count));
            continue;
          }
          if (k > skipped) {
            const float factor = std::exp2(before - top[r]);
            whole[r] *= factor;
            for (int64_t d = 0; d < lds; d += W) store(out + r * lds + d, load(out + r * lds + d) * factor);
          }
          if (dropout.threshold) keep_bits(dropout, line + i + r, first / 8, (first % 8 + count + 7) / 8, bits);
          vf sum{};
          for (int64_t j = 0; j < width; j += W) {
            vf p = exp2_of_score(load(s + j) * scale - top[r]);
            sum += p;
            if (dropout.threshold) p = keep(p, bits, first % 8 + j);
            store(weights + r * ldw + j, p);
          }
          if (width < padded<T>(count)) store(weights + r * ldw + width, vf{});
          whole[r] += total(sum);
        }
        const auto sum = k == skipped ? multiply<T, false> : multiply<T, true>;
        sum(rows, lds, units<T>(count), reinterpret_cast<U*>(weights), ldw / Unit<T>::pack, 1,
            value_pairs + k / Unit<T>::pack * lds, lds, out, lds);
      }
      for (int64_t r = 0; r < rows; ++r) {
        lse[i + r] = top[r] / kLog2e + std::log(whole[r]);
        const float factor = dropout.scale / whole[r];
        for (int64_t d = 0; d < size; d += W)
          store(context + (i + r) * a.heads * size + d, load(out + r * lds + d) * factor, size - d);
      }
    }
  });
}

// With P the probabilities, M the scaled dropout mask, C the context:
//   dV = (P M)^T dC; dP = (dC V^T) M; dS = P (dP - rowsum(dC C)) / sqrt(size); dQ = dS K; dK = dS^T Q.
// Sums over the row's tokens are computed before rounding.
template <class T>
static void attend_backward(const Attention<T>& a, const Dropout& dropout, int64_t row, int64_t head,
                            const Heads& part) {
  typedef typename Unit<T>::type U;
  constexpr int pack = Unit<T>::pack;
  constexpr int64_t kBlock = Unit<T>::grain > 1 ? kQueries<T> : 36, kColumns = kKeys / 2;
  static thread_local Scratch scratch;
  const int64_t tokens = a.tokens, size = a.size, ld = 3 * a.heads * size, ldc = a.heads * size;
  const int64_t most = apart<T>(tokens), steps = units<T>(size), lds = padded<float>(size);
  const int64_t ldw = apart<T>(tokens < kColumns ? tokens : kColumns);
  const int64_t stride = ldw / 8 + 2 * W + 8;  // of a row's dropout bits
  scratch.reset(sizeof(U) * (2 * steps * most + units<T>(tokens) * lds + kBlock * (2 * steps + 2 * lds + 3 * ldw)) +
                sizeof(float) * (kBlock * (2 * ldw + lds) + (2 * tokens + 3) * lds) + pack * stride + 2048);
  U* key_columns = scratch.take<U>(steps * most);
  U* value_columns = scratch.take<U>(steps * most);
  U* key_pairs = scratch.take<U>(units<T>(tokens) * lds);
  U* query_rows = scratch.take<U>(kBlock * steps);
  U* grad_rows = scratch.take<U>(kBlock * steps);
  U* query_pairs = scratch.take<U>(units<T>(kBlock) * lds);
  U* grad_pairs = scratch.take<U>(units<T>(kBlock) * lds);
  T* ds_rows = reinterpret_cast<T*>(scratch.take<U>(kBlock * ldw));
  U* ds_pairs = scratch.take<U>(units<T>(kBlock) * ldw);
  U* p_pairs = scratch.take<U>(units<T>(kBlock) * ldw);
  float* scores = scratch.take<float>(kBlock * ldw);
  float* dp = scratch.take<float>(kBlock * ldw);
  float* dq = scratch.take<float>(kBlock * lds);
  float* dk = scratch.take<float>(tokens * lds);
  float* dv = scratch.take<float>(tokens * lds);
  float* sums = scratch.take<float>(3 * lds);
  uint8_t* bits = scratch.take<uint8_t>(pack * stride);
  float delta[kBlock], norm[kBlock];  // of a query: rowsum(dC C), log-sum-exp in powers of two
  const T* query = a.qkv + row * tokens * ld + head * size;
  const T *key = query + a.heads * size, *value = key + a.heads * size;
  const T* context = a.context + row * tokens * ldc + head * size;
  const T* grad = a.grad + row * tokens * ldc + head * size;
  T* dqkv = a.dqkv + row * tokens * ld + head * size;
  const float* lse = a.lse + (row * a.heads + head) * tokens;
  const uint64_t line = (static_cast<uint64_t>(row) * a.heads + head) * tokens;
  const NextTask<T> next(a, row, head, part);
  // Factors common to a whole result are applied at its end: those of dropout and of the scores.
  const float kept = dropout.scale, root = 1.0f / std::sqrt(static_cast<float>(size)), scale = root * kLog2e;
  memset(dk, 0, sizeof(float) * tokens * lds);
  memset(dv, 0, sizeof(float) * tokens * lds);
  memset(sums, 0, sizeof(float) * 3 * lds);
  const int32_t *start = a.start + row * tokens, *end = a.end + row * tokens;
  const auto write = [&](int64_t which, int64_t token, const float* line, float factor) {  // of q, k, v: 0, 1, 2
    for (int64_t c = 0; c < size; c += W) {
      const vf value = load(line + c) * factor;
      store(dqkv + token * ld + which * ldc + c, value, size - c);
      store(sums + which * lds + c, load(sums + which * lds + c) + value);
    }
  };

  for_each_run(start, end, tokens, [&](int64_t i0, int64_t queries, int64_t j0, int64_t keys) {
    if (keys <= 0) {
      for (int64_t i = i0; i < i0 + queries; ++i) memset(dqkv + i * ld, 0, sizeof(T) * size);
      return;
    }
    const int64_t ldk = apart<T>(keys);
    pack_columns(key + j0 * ld, ld, keys, size, key_columns, ldk);
    pack_columns(value + j0 * ld, ld, keys, size, value_columns, ldk);
    pack_pairs(key + j0 * ld, ld, keys, size, key_pairs, lds);
    for (int64_t i = i0; i < i0 + queries; i += kBlock) {
      const int64_t rows = i0 + queries - i < kBlock ? i0 + queries - i : kBlock;
      const int64_t skipped = (start[i] - j0) / kGrain<T> * kGrain<T>, seen = most_keys(end, i, rows, j0);
      pack_rows(query + i * ld, ld, rows, size, query_rows);
      pack_rows(grad + i * ldc, ldc, rows, size, grad_rows);
      pack_pairs(query + i * ld, ld, rows, size, query_pairs, lds);
      pack_pairs(grad + i * ldc, ldc, rows, size, grad_pairs, lds);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = i + r;
        vf product{};
        for (int64_t c = 0; c < size; c += W)
          product += load(grad + at * ldc + c, size - c) * load(context + at * ldc + c, size - c);
        delta[r] = total(product) / kept, norm[r] = lse[at] * kLog2e;
      }
      for (int64_t k = skipped; k < seen; k += kColumns) {
        const int64_t count = seen - k < kColumns ? seen - k : kColumns, width = padded<float>(count), first = j0 + k;
        multiply<T, false>(rows, width, steps, query_rows, steps, 1, key_columns + k, ldk, scores, ldw);
        multiply<T, false>(rows, width, steps, grad_rows, steps, 1, value_columns + k, ldk, dp, ldw);
        for (int64_t r = 0; r < units<T>(rows) * pack; r += pack) {  // as many rows as make a unit of the transposed operands
          if (r >= rows) {
            memset(p_pairs + r / pack * ldw, 0, sizeof(U) * width);
            memset(ds_pairs + r / pack * ldw, 0, sizeof(U) * width);
            continue;
          }
          for (int h = 0; h < pack; ++h) {
            if (r + h >= rows) {  // the other half of the last pair: probability 0
              for (int64_t j = 0; j < width; j += W) store(scores + (r + h) * ldw + j, splat(-INFINITY));
              memset(dp + (r + h) * ldw, 0, sizeof(float) * width);
              delta[r + h] = norm[r + h] = 0;
              continue;
            }
            const int64_t at = i + r + h;
            if (k == skipped) next.fetch(at);
            hide_outside(scores + (r + h) * ldw, start[at] - first, end[at] - first, width);
            if (dropout.threshold)
              keep_bits(dropout, line + at, first / 8, (first % 8 + count + 7) / 8, bits + h * stride);
          }
          for (int64_t j = 0; j < width; j += W) {
            vf p[pack], d[pack];
            for (int h = 0; h < pack; ++h) {
              const vf weight = exp2_of_score(load(scores + (r + h) * ldw + j) * scale - norm[r + h]);
              vf change = load(dp + (r + h) * ldw + j);
              p[h] = weight;
              if (dropout.threshold) {
                p[h] = keep(weight, bits + h * stride, first % 8 + j);
                change = keep(change, bits + h * stride, first % 8 + j);
              }
              d[h] = (change - delta[r + h]) * weight;
              store(ds_rows + (r + h) * ldw + j, d[h]);
            }
            store_units(p_pairs + r / pack * ldw + j, p);
            store_units(ds_pairs + r / pack * ldw + j, d);
          }
          for (int h = 0; h < pack && width < padded<T>(count); ++h) store(ds_rows + (r + h) * ldw + width, vf{});
        }
        const auto sum = k == skipped ? multiply<T, false> : multiply<T, true>;
        sum(rows, lds, units<T>(count), reinterpret_cast<U*>(ds_rows), ldw / pack, 1, key_pairs + k / pack * lds, lds, dq,
            lds);
        multiply<T, true>(count, lds, units<T>(rows), p_pairs, 1, ldw, grad_pairs, lds, dv + first * lds, lds);
        multiply<T, true>(count, lds, units<T>(rows), ds_pairs, 1, ldw, query_pairs, lds, dk + first * lds, lds);
      }
      for (int64_t r = 0; r < rows; ++r) write(0, i + r, dq + r * lds, root * kept);
    }
  });
  for (int64_t j = 0; j < tokens; ++j) {
    write(1, j, dk + j * lds, root * kept);
    write(2, j, dv + j * lds, kept);
  }
  for (int64_t which = 0; which < 3; ++which)
    memcpy(a.sums + row * ld + (which * a.heads + head) * size, sums + which * lds, sizeof(float) * size);
}

template <class T>
static void attention(const Attention<T>& a, const Dropout& dropout, const Heads& part) {
  [[maybe_unused]] const typename Unit<T>::Registers registers{};
  const auto task = a.sums ? attend_backward<T> : attend<T>;
  for (int64_t row = part.row; row < part.last_row; ++row)
    for (int64_t head = part.head; head < part.last_head; ++head) task(a, dropout, row, head, part);
}
