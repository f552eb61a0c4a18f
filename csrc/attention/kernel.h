// Attention of one head over one row of packed sequences, in fp32 but for the products' operands.
//
// Tokens with the same key range [start, end) next to each other are a run (a sequence, or the pads); all work is inside a
// run. Scores of a block of queries against all keys of the run stay in cache; the probabilities are never in memory as a
// whole, backward computes them again from the saved log-sum-exp. Operands are packed as cpu/gemm.h describes:
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
  return __builtin_convertvector(narrow(even), vu) | (__builtin_convertvector(narrow(odd), vu) << 16);
}

static void pack_pairs(const bf16* x, int64_t ld, int64_t count, int64_t width, uint32_t* out, int64_t ldb) {
  for (int64_t i = 0; i < count; i += 2) {
    for (int64_t j = 0; j < ldb; j += W) {
      const vf even = load(x + i * ld + j, width - j);
      const vf odd = i + 1 < count ? load(x + (i + 1) * ld + j, width - j) : vf{};
      const vu unit = interleave(even, odd);
      memcpy(out + i / 2 * ldb + j, &unit, sizeof unit);
    }
  }
}
static void pack_pairs(const float* x, int64_t ld, int64_t count, int64_t width, float* out, int64_t ldb) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < ldb; j += W) store(out + i * ldb + j, load(x + i * ld + j, width - j));
}

// One line of units from `pack` neighbouring fp32 lines of `width` (a multiple of W).
INLINE void pack_line(const float* x, int64_t width, uint32_t* out) {
  for (int64_t j = 0; j < width; j += W) {
    const vu unit = interleave(load(x + j), load(x + width + j));
    memcpy(out + j, &unit, sizeof unit);
  }
}
INLINE void pack_line(const float* x, int64_t width, float* out) { memcpy(out, x, sizeof(float) * width); }

INLINE int64_t padded(int64_t n) { return (n + W - 1) / W * W; }
template <class T>
INLINE int64_t units(int64_t n) { return (n + Unit<T>::pack - 1) / Unit<T>::pack; }

// Calls f(first query, queries, first key, keys) for each run.
template <class F>
INLINE void for_each_run(const int32_t* start, const int32_t* end, int64_t tokens, F f) {
  for (int64_t i = 0; i < tokens;) {
    int64_t next = i + 1;
    while (next < tokens && start[next] == start[i] && end[next] == end[i]) ++next;
    f(i, next - i, static_cast<int64_t>(start[i]), static_cast<int64_t>(end[i]) - start[i]);
    i = next;
  }
}

template <class T>
static void attention(const Attention<T>& a, int64_t row, int64_t head) {
  typedef typename Unit<T>::type U;
  constexpr int64_t kBlock = 24;  // queries at once
  static thread_local Scratch scratch;
  const int64_t tokens = a.tokens, size = a.size, ld = 3 * a.heads * size, most = padded(tokens);
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
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));

  for_each_run(a.start + row * tokens, a.end + row * tokens, tokens, [&](int64_t i0, int64_t queries, int64_t j0, int64_t keys) {
    if (keys <= 0) {  // nothing to attend to: zeros
      for (int64_t i = i0; i < i0 + queries; ++i) {
        memset(context + i * a.heads * size, 0, sizeof(T) * size);
        lse[i] = -INFINITY;
      }
      return;
    }
    const int64_t ldk = padded(keys);
    pack_columns(key + j0 * ld, ld, keys, size, key_columns, ldk);
    pack_pairs(value + j0 * ld, ld, keys, size, value_pairs, lds);
    for (int64_t i = i0; i < i0 + queries; i += kBlock) {
      const int64_t rows = i0 + queries - i < kBlock ? i0 + queries - i : kBlock;
      pack_rows(query + i * ld, ld, rows, size, query_rows);
      multiply<T, false>(rows, ldk, steps, query_rows, steps, 1, key_columns, ldk, scores, ldk);
      for (int64_t r = 0; r < rows; ++r) {
        float* s = scores + r * ldk;
        for (int64_t j = keys; j < ldk; ++j) s[j] = -INFINITY;
        vf most_v = load(s);
        for (int64_t j = W; j < ldk; j += W) most_v = larger(load(s + j), most_v);
        const float top = largest(most_v) * scale;
        if (a.dropout.threshold) keep_bits(a.dropout, line + i + r, j0 / 8, (j0 % 8 + keys + 7) / 8, bits);
        vf sum{};
        for (int64_t j = 0; j < ldk; j += W) {
          vf p = exp(load(s + j) * scale - top);
          sum += p;
          if (a.dropout.threshold) p = keep(p, bits, j0 % 8 + j);
          store(weights + r * ldk + j, p);
        }
        const float whole = total(sum);
        lse[i + r] = top + std::log(whole);
        s[0] = a.dropout.scale / whole;
      }
      multiply<T, false>(rows, lds, units<T>(keys), reinterpret_cast<U*>(weights), ldk / Unit<T>::pack, 1, value_pairs, lds, out, lds);
      for (int64_t r = 0; r < rows; ++r) {
        const float factor = scores[r * ldk];
        for (int64_t d = 0; d < size; d += W)
          store(context + (i + r) * a.heads * size + d, load(out + r * lds + d) * factor, size - d);
      }
    }
  });
}

// With P the probabilities, M the scaled dropout mask, C the context:
//   dV = (P M)^T dC; dP = (dC V^T) M; dS = P (dP - rowsum(dC C)) / sqrt(size); dQ = dS K; dK = dS^T Q.
template <class T>
static void attention_backward(const Attention<T>& a, int64_t row, int64_t head) {
  typedef typename Unit<T>::type U;
  constexpr int pack = Unit<T>::pack;
  constexpr int64_t kBlock = 36;
  static thread_local Scratch scratch;
  const int64_t tokens = a.tokens, size = a.size, ld = 3 * a.heads * size, ldc = a.heads * size;
  const int64_t most = padded(tokens), steps = units<T>(size), lds = padded(size);
  scratch.reset(sizeof(U) * (2 * steps * most + units<T>(tokens) * lds + kBlock * (2 * steps + 2 * lds + 3 * most)) +
                sizeof(float) * (kBlock * (2 * most + lds) + 2 * tokens * lds) + pack * (tokens / 8 + 4 * W) + 2048);
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
  uint8_t* bits = scratch.take<uint8_t>(tokens / 8 + 2 * W + 8);
  const T* query = a.qkv + row * tokens * ld + head * size;
  const T *key = query + a.heads * size, *value = key + a.heads * size;
  const T* context = a.context + row * tokens * ldc + head * size;
  const T* grad = a.grad + row * tokens * ldc + head * size;
  T* dqkv = a.dqkv + row * tokens * ld + head * size;
  const float* lse = a.lse + (row * a.heads + head) * tokens;
  const uint64_t line = (static_cast<uint64_t>(row) * a.heads + head) * tokens;
  const float scale = 1.0f / std::sqrt(static_cast<float>(size)), kept = a.dropout.scale;
  memset(dk, 0, sizeof(float) * tokens * lds);
  memset(dv, 0, sizeof(float) * tokens * lds);

  for_each_run(a.start + row * tokens, a.end + row * tokens, tokens, [&](int64_t i0, int64_t queries, int64_t j0, int64_t keys) {
    if (keys <= 0) {
      for (int64_t i = i0; i < i0 + queries; ++i) memset(dqkv + i * ld, 0, sizeof(T) * size);
      return;
    }
    const int64_t ldk = padded(keys);
    pack_columns(key + j0 * ld, ld, keys, size, key_columns, ldk);
    pack_columns(value + j0 * ld, ld, keys, size, value_columns, ldk);
    pack_pairs(key + j0 * ld, ld, keys, size, key_pairs, lds);
    for (int64_t i = i0; i < i0 + queries; i += kBlock) {
      const int64_t rows = i0 + queries - i < kBlock ? i0 + queries - i : kBlock;
      pack_rows(query + i * ld, ld, rows, size, query_rows);
      pack_rows(grad + i * ldc, ldc, rows, size, grad_rows);
      pack_pairs(query + i * ld, ld, rows, size, query_pairs, lds);
      pack_pairs(grad + i * ldc, ldc, rows, size, grad_pairs, lds);
      multiply<T, false>(rows, ldk, steps, query_rows, steps, 1, key_columns, ldk, scores, ldk);
      multiply<T, false>(rows, ldk, steps, grad_rows, steps, 1, value_columns, ldk, dp, ldk);
      for (int64_t r0 = 0; r0 < rows; r0 += pack) {
        for (int64_t r = r0; r < r0 + pack; ++r) {  // scores become P M, dp becomes dS
          float *s = scores + r * ldk, *d = dp + r * ldk;
          if (r >= rows) {  // the other half of the last pair
            memset(s, 0, sizeof(float) * ldk);
            memset(d, 0, sizeof(float) * ldk);
            continue;
          }
          for (int64_t j = keys; j < ldk; ++j) s[j] = -INFINITY;
          vf dot{};
          for (int64_t c = 0; c < size; c += W)
            dot += load(grad + (i + r) * ldc + c, size - c) * load(context + (i + r) * ldc + c, size - c);
          const float delta = total(dot), norm = lse[i + r];
          if (a.dropout.threshold) {
            keep_bits(a.dropout, line + i + r, j0 / 8, (j0 % 8 + keys + 7) / 8, bits);
            for (int64_t j = 0; j < ldk; j += W) {
              const vf p = exp(load(s + j) * scale - norm);
              store(s + j, keep(p * kept, bits, j0 % 8 + j));
              store(d + j, p * (keep(load(d + j) * kept, bits, j0 % 8 + j) - delta) * scale);
            }
          } else {
            for (int64_t j = 0; j < ldk; j += W) {
              const vf p = exp(load(s + j) * scale - norm);
              store(s + j, p);
              store(d + j, p * (load(d + j) - delta) * scale);
            }
          }
          for (int64_t j = 0; j < ldk; j += W) store(reinterpret_cast<T*>(ds_rows) + r * ldk + j, load(d + j));
        }
        pack_line(scores + r0 * ldk, ldk, p_pairs + r0 / pack * ldk);
        pack_line(dp + r0 * ldk, ldk, ds_pairs + r0 / pack * ldk);
      }
      multiply<T, false>(rows, lds, units<T>(keys), ds_rows, ldk / pack, 1, key_pairs, lds, dq, lds);
      multiply<T, true>(keys, lds, units<T>(rows), p_pairs, 1, ldk, grad_pairs, lds, dv + j0 * lds, lds);
      multiply<T, true>(keys, lds, units<T>(rows), ds_pairs, 1, ldk, query_pairs, lds, dk + j0 * lds, lds);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < size; c += W) store(dqkv + (i + r) * ld + c, load(dq + r * lds + c), size - c);
    }
  });
  for (int64_t j = 0; j < tokens; ++j) {
    for (int64_t c = 0; c < size; c += W) {
      store(dqkv + j * ld + a.heads * size + c, load(dk + j * lds + c), size - c);
      store(dqkv + j * ld + 2 * a.heads * size + c, load(dv + j * lds + c), size - c);
    }
  }
}
