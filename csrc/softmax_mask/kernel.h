// softmax(scale * scores + mask) and dropout of one row of scores, then its gradient. Keys outside the row's range are
// neither read nor computed: they get zeros. A row without any key is all zeros; NaN in a row stays visible.

// One vector of the mask from key `key` on, in units of log2; lanes past n are not used by the caller.
template <class T>
INLINE vf mask_values(const SoftmaxMask& a, int64_t at, int64_t key, int64_t n) {
  const int64_t step = a.mask_stride[3], first = at + key * step;
  const int64_t count = n < W ? n : W;
  if (a.kind == MaskKind::allowed) {
    const uint8_t* p = static_cast<const uint8_t*>(a.mask) + first;
    vi bytes{};
    for (int64_t i = 0; i < count; ++i) bytes[i] = p[i * step];
    return bytes ? vf{} : splat(-INFINITY);
  }
  vf line{};
  const T* p = static_cast<const T*>(a.mask) + first;
  if (step == 1) line = load(p, n);
  else for (int64_t i = 0; i < count; ++i) line[i] = load(p + i * step, 1)[0];
  return line * 1.44269504f;
}

template <class T>
static void softmax_mask(const SoftmaxMask& a, const T* scores, T* out, T* probs, Dropout dropout, int64_t begin,
                         int64_t end) {
  static thread_local Scratch scratch;
  const int64_t padded = (a.keys + 2 * W - 1) / W * W;
  scratch.reset(4 * padded + a.keys / 8 + 8 * W + 256);
  float* line = scratch.take<float>(padded);
  uint8_t* bits = scratch.take<uint8_t>(a.keys / 8 + 2 * W + 16);
  const float scale = a.scale * 1.44269504f;  // powers of two from here on
  for (int64_t r = begin; r < end; ++r) {
    const int64_t query = r % a.queries, head = r / a.queries % a.heads, batch = r / a.queries / a.heads;
    const int64_t first = a.start ? a.start[batch * a.start_stride[0] + query * a.start_stride[1]] : 0;
    int64_t last = a.end ? a.end[batch * a.end_stride[0] + query * a.end_stride[1]] : a.keys;
    if (last < first) last = first;
    const int64_t at = batch * a.mask_stride[0] + head * a.mask_stride[1] + query * a.mask_stride[2];
    const T* x = scores + r * a.keys;
    T *y = out + r * a.keys, *weights = probs ? probs + r * a.keys : nullptr;
    memset(y, 0, sizeof(T) * first);
    memset(y + last, 0, sizeof(T) * (a.keys - last));
    if (weights) {
      memset(weights, 0, sizeof(T) * first);
      memset(weights + last, 0, sizeof(T) * (a.keys - last));
      if (first < last) keep_bits(dropout, r, first / 8, (first % 8 + last - first + 7) / 8, bits);
    }
    vf most = splat(-INFINITY);
    for (int64_t j = first; j < last; j += W) {
      const int64_t n = last - j;
      vf v = load(x + j, n) * scale;
      if (a.kind != MaskKind::none) v += mask_values<T>(a, at, j, n);
      if (n < W) v = lanes() < splat_i(static_cast<int32_t>(n)) ? v : splat(-INFINITY);
      store(line + j - first, v);
      most = larger(v, most);
    }
    const float largest_score = largest(most), top = largest_score == -INFINITY ? 0.0f : largest_score;
    vf sum{};
    for (int64_t j = 0; j < last - first; j += W) {
      const vf v = load(line + j) - top;
      const vf e = exp2_of_score(v);  // a masked key has weight 0
      store(line + j, e);
      sum += e;
    }
    const float whole = total(sum), inverse = whole == 0.0f ? 0.0f : 1.0f / whole;
    for (int64_t j = first; j < last; j += W) {
      const int64_t n = last - j;
      const vf p = load(line + j - first) * inverse;
      if (weights) store(weights + j, p, n);
      store(y + j, weights ? keep(p * dropout.scale, bits, first % 8 + j - first) : p, n);
    }
  }
}

// With P the probabilities and M the scaled dropout mask: dP = grad M, dscores = scale P (dP - rowsum(dP P)).
template <class T>
static void softmax_mask_backward(const T* grad, const T* probs, T* dscores, int64_t keys, float scale, Dropout dropout,
                                  int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  scratch.reset(keys / 8 + 8 * W + 256);
  uint8_t* bits = scratch.take<uint8_t>(keys / 8 + 2 * W + 16);
  for (int64_t r = begin; r < end; ++r) {
    const T *g = grad + r * keys, *p = probs + r * keys;
    if (dropout.threshold) keep_bits(dropout, r, 0, (keys + 7) / 8, bits);
    const auto change = [&](int64_t j) __attribute__((always_inline)) {
      const vf d = load(g + j, keys - j);
      return dropout.threshold ? keep(d * dropout.scale, bits, j) : d;
    };
    vf sum{};
    for (int64_t j = 0; j < keys; j += W) sum += change(j) * load(p + j, keys - j);
    const float dot = total(sum);
    for (int64_t j = 0; j < keys; j += W)
      store(dscores + r * keys + j, (change(j) - dot) * load(p + j, keys - j) * scale, keys - j);
  }
}
