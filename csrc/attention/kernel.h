// Attention of one head over one row of packed sequences, in fp32 except for the products' operands.
//
// A run is a sequence of tokens (or the pads) whose key ranges [start, end) begin at the same key, or, with a window, each not before
// the previous one's and before the token itself; all work is inside a run. Bounds may differ (causal model, window): a block of
// queries uses the keys from its first start, rounded down to a whole vector, to its last end, and keys outside of a query's range
// are masked. A long run of windows is cut, so that its packed keys stay in cache. Scores of a block of queries stay in cache; the
// whole matrix of probabilities is never in memory, backward recomputes it from the saved log-sum-exp. Operands are packed as in
// cpu/gemm.h:
//   columns(X): X^T for C = A X^T      pairs(X): X for C = A X      rows(X): X as left operand

template <class T>
static void pack_rows(const T* x, int64_t ld, int64_t count, int64_t width, typename Unit<T>::type* out) {
  constexpr int pack = Unit<T>::pack;
  const int64_t steps = (width + pack - 1) / pack;
  for (int64_t i = 0; i < count; ++i) {
    out[i * steps + steps - 1] = 0;
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
    for (int64_t t = 0; t * pack < width; ++t) {
      U line[W] = {};
      for (int64_t i = 0; i < n; ++i) memcpy(&line[i], x + (j + i) * ld + t * pack, t < whole ? sizeof(U) : sizeof(T));
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
  for (int64_t i = 0; i < count; i += pack)
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

INLINE int64_t padded(int64_t n) { return (n + W - 1) / W * W; }
// Distance of lines of `n` elements: an odd number of vectors, since lines a power of two apart share a few sets of the cache.
INLINE int64_t apart(int64_t n) { return padded(n) | W; }
// Added to the last vector of a line of scores: -inf in lanes past the end, zero in the others.
INLINE vf past_end(int64_t keys) { return lanes() < splat_i(keys - padded(keys) + W) ? vf{} : splat(-INFINITY); }
template <class T>
INLINE int64_t units(int64_t n) { return (n + Unit<T>::pack - 1) / Unit<T>::pack; }

// Masks the scores past `keys` in a line of `width` (a multiple of W).
INLINE void hide_past(float* scores, int64_t keys, int64_t width) {
  float* last = scores + padded(keys) - W;
  store(last, load(last) + past_end(keys));
  for (int64_t j = padded(keys); j < width; j += W) store(scores + j, splat(-INFINITY));
}

// Masks the scores before key `keys` of a line.
INLINE void hide_before(float* scores, int64_t keys) {
  int64_t j = 0;
  for (; j + W <= keys; j += W) store(scores + j, splat(-INFINITY));
  if (j < keys) store(scores + j, lanes() < splat_i(keys - j) ? splat(-INFINITY) : load(scores + j));
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

template <class T>
static void attend(const Attention<T>& a, int64_t row, int64_t head, const Heads& part) {
  typedef typename Unit<T>::type U;
  constexpr int64_t kBlock = 24;  // queries at once
  static thread_local Scratch scratch;
  const int64_t tokens = a.tokens, size = a.size, ld = 3 * a.heads * size, most = apart(tokens);
  const int64_t steps = units<T>(size), lds = padded(size);
  scratch.reset(sizeof(U) * (steps * most + units<T>(tokens) * lds + kBlock * (steps + most)) +
                sizeof(float) * kBlock * (most + lds) + tokens / 8 + 4 * W + 1024);
  U* key_columns = scratch.take<U>(steps * most);
  U* value_pairs = scratch.take<U>(units<T>(tokens) * lds);
  U* query_rows = scratch.take<U>(kBlock * steps);
  T* weights = reinterpret_cast<T*>(scratch.take<U>(kBlock * most));
  float* scores = scratch.take<float>(kBlock * most);
  float* out = scratch.take<float>(kBlock * lds);
  uint8_t* bits = scratch.take<uint8_t>(tokens / 8 + 2 * W + 8);
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
    const int64_t ldk = apart(keys);
    pack_columns(key + j0 * ld, ld, keys, size, key_columns, ldk);
    pack_pairs(value + j0 * ld, ld, keys, size, value_pairs, lds);
    for (int64_t i = i0; i < i0 + queries; i += kBlock) {
      const int64_t rows = i0 + queries - i < kBlock ? i0 + queries - i : kBlock;
      const int64_t skipped = (start[i] - j0) / W * W, first = j0 + skipped;
      const int64_t seen = most_keys(end, i, rows, first), width = padded(seen), ldw = apart(seen);
      pack_rows(query + i * ld, ld, rows, size, query_rows);
      multiply<T, false>(rows, width, steps, query_rows, steps, 1, key_columns + skipped, ldk, scores, ldw);
      for (int64_t r = 0; r < rows; ++r) {
        float* s = scores + r * ldw;
        hide_past(s, end[i + r] - first, width);
        hide_before(s, start[i + r] - first);
        vf most_v = load(s);
        for (int64_t j = W; j < width; j += W) most_v = larger(load(s + j), most_v);
        const float top = largest(most_v) * scale;
        if (a.dropout.threshold) keep_bits(a.dropout, line + i + r, first / 8, (first % 8 + seen + 7) / 8, bits);
        next.fetch(i + r);
        vf sum{};
        for (int64_t j = 0; j < width; j += W) {
          vf p = exp2_of_score(load(s + j) * scale - top);
          sum += p;
          if (a.dropout.threshold) p = keep(p, bits, first % 8 + j);
          store(weights + r * ldw + j, p);
        }
        const float whole = total(sum);
        lse[i + r] = top / kLog2e + std::log(whole);
        s[0] = a.dropout.scale / whole;
      }
      multiply<T, false>(rows, lds, units<T>(seen), reinterpret_cast<U*>(weights), ldw / Unit<T>::pack, 1,
                         value_pairs + skipped / Unit<T>::pack * lds, lds, out, lds);
      for (int64_t r = 0; r < rows; ++r) {
        const float factor = scores[r * ldw];
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
static void attend_backward(const Attention<T>& a, int64_t row, int64_t head, const Heads& part) {
  typedef typename Unit<T>::type U;
  constexpr int pack = Unit<T>::pack;
  constexpr int64_t kBlock = 36;
  static thread_local Scratch scratch;
  const int64_t tokens = a.tokens, size = a.size, ld = 3 * a.heads * size, ldc = a.heads * size;
  const int64_t most = apart(tokens), steps = units<T>(size), lds = padded(size);
  const int64_t stride = tokens / 8 + 2 * W + 8;  // of a row's dropout bits
  scratch.reset(sizeof(U) * (2 * steps * most + units<T>(tokens) * lds + kBlock * (2 * steps + 2 * lds + 3 * most)) +
                sizeof(float) * (kBlock * (2 * most + lds) + (2 * tokens + 3) * lds) + pack * stride + 2048);
  U* key_columns = scratch.take<U>(steps * most);
  U* value_columns = scratch.take<U>(steps * most);
  U* key_pairs = scratch.take<U>(units<T>(tokens) * lds);
  U* query_rows = scratch.take<U>(kBlock * steps);
  U* grad_rows = scratch.take<U>(kBlock * steps);
  U* query_pairs = scratch.take<U>(units<T>(kBlock) * lds);
  U* grad_pairs = scratch.take<U>(units<T>(kBlock) * lds);
  U* ds_rows = scratch.take<U>(kBlock * most);
  U* ds_pairs = scratch.take<U>(units<T>(kBlock) * most);
  U* p_pairs = scratch.take<U>(units<T>(kBlock) * most);
  float* scores = scratch.take<float>(kBlock * most);
  float* dp = scratch.take<float>(kBlock * most);
  float* dq = scratch.take<float>(kBlock * lds);
  float* dk = scratch.take<float>(tokens * lds);
  float* dv = scratch.take<float>(tokens * lds);
  float* sums = scratch.take<float>(3 * lds);
  uint8_t* bits = scratch.take<uint8_t>(pack * stride);
  const T* query = a.qkv + row * tokens * ld + head * size;
  const T *key = query + a.heads * size, *value = key + a.heads * size;
  const T* context = a.context + row * tokens * ldc + head * size;
  const T* grad = a.grad + row * tokens * ldc + head * size;
  T* dqkv = a.dqkv + row * tokens * ld + head * size;
  const float* lse = a.lse + (row * a.heads + head) * tokens;
  const uint64_t line = (static_cast<uint64_t>(row) * a.heads + head) * tokens;
  const NextTask<T> next(a, row, head, part);
  // Factors common to a whole result are applied at its end: those of dropout and of the scores.
  const float kept = a.dropout.scale, root = 1.0f / std::sqrt(static_cast<float>(size)), scale = root * kLog2e;
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
    const int64_t ldk = apart(keys);
    pack_columns(key + j0 * ld, ld, keys, size, key_columns, ldk);
    pack_columns(value + j0 * ld, ld, keys, size, value_columns, ldk);
    pack_pairs(key + j0 * ld, ld, keys, size, key_pairs, lds);
    for (int64_t i = i0; i < i0 + queries; i += kBlock) {
      const int64_t rows = i0 + queries - i < kBlock ? i0 + queries - i : kBlock;
      const int64_t skipped = (start[i] - j0) / W * W, first = j0 + skipped;
      const int64_t seen = most_keys(end, i, rows, first), width = padded(seen), ldw = apart(seen);
      pack_rows(query + i * ld, ld, rows, size, query_rows);
      pack_rows(grad + i * ldc, ldc, rows, size, grad_rows);
      pack_pairs(query + i * ld, ld, rows, size, query_pairs, lds);
      pack_pairs(grad + i * ldc, ldc, rows, size, grad_pairs, lds);
      multiply<T, false>(rows, width, steps, query_rows, steps, 1, key_columns + skipped, ldk, scores, ldw);
      multiply<T, false>(rows, width, steps, grad_rows, steps, 1, value_columns + skipped, ldk, dp, ldw);
      for (int64_t r = 0; r < rows; r += pack) {  // as many rows as make a unit of the transposed operands
        vf delta[pack], norm[pack];
        for (int h = 0; h < pack; ++h) {
          const int64_t at = i + r + h;
          delta[h] = vf{}, norm[h] = splat(INFINITY);
          if (r + h >= rows) {  // the other half of the last pair: probability 0
            memset(scores + (r + h) * ldw, 0, sizeof(float) * width);
            memset(dp + (r + h) * ldw, 0, sizeof(float) * width);
            continue;
          }
          for (int64_t c = 0; c < size; c += W)
            delta[h] += load(grad + at * ldc + c, size - c) * load(context + at * ldc + c, size - c);
          delta[h] = splat(total(delta[h]) / kept), norm[h] = splat(lse[at] * kLog2e);
          hide_past(scores + (r + h) * ldw, end[at] - first, width);
          hide_before(scores + (r + h) * ldw, start[at] - first);
          if (a.dropout.threshold) keep_bits(a.dropout, line + at, first / 8, (first % 8 + seen + 7) / 8, bits + h * stride);
          next.fetch(at);
        }
        for (int64_t j = 0; j < width; j += W) {
          vf p[pack], d[pack];
          for (int h = 0; h < pack; ++h) {
            const vf weight = exp2_of_score(load(scores + (r + h) * ldw + j) * scale - norm[h]);
            vf change = load(dp + (r + h) * ldw + j);
            p[h] = weight;
            if (a.dropout.threshold) {
              p[h] = keep(weight, bits + h * stride, first % 8 + j);
              change = keep(change, bits + h * stride, first % 8 + j);
            }
            d[h] = (change - delta[h]) * weight;
            store(reinterpret_cast<T*>(ds_rows) + (r + h) * ldw + j, d[h]);
          }
          store_units(p_pairs + r / pack * ldw + j, p);
          store_units(ds_pairs + r / pack * ldw + j, d);
        }
      }
      multiply<T, false>(rows, lds, units<T>(seen), ds_rows, ldw / pack, 1, key_pairs + skipped / pack * lds, lds, dq,
                         lds);
      multiply<T, true>(seen, lds, units<T>(rows), p_pairs, 1, ldw, grad_pairs, lds, dv + first * lds, lds);
      multiply<T, true>(seen, lds, units<T>(rows), ds_pairs, 1, ldw, query_pairs, lds, dk + first * lds, lds);
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
static void attention(const Attention<T>& a, const Heads& part) {
  const auto task = a.sums ? attend_backward<T> : attend<T>;
  for (int64_t row = part.row; row < part.last_row; ++row)
    for (int64_t head = part.head; head < part.last_head; ++head) task(a, row, head, part);
}
