// One row of logits: a first pass finds the largest and the sum of exponentials (block by block, in cache), a second
// overwrites the logits with their gradient. Ignored rows get zeros, and so does the padding from `vocab` to `stride`, which is
// not part of the distribution.

template <class T>
static void mlm_loss(LossRows<T> a, float* dbias, int64_t begin, int64_t end) {
  constexpr int64_t block = 32 * W;
  if (a.gradient) memset(dbias, 0, sizeof(float) * a.stride);
  for (int64_t r = begin; r < end; ++r) {
    T* row = a.logits + r * a.stride;
    const int64_t label = a.labels[r];
    a.loss[r] = 0, a.lse[r] = 0, a.correct[r] = 0;
    if (label == kIgnore) {
      if (a.gradient) memset(row, 0, sizeof(T) * a.stride);
      continue;
    }
    float top = -INFINITY, sum = 0;
    for (int64_t start = 0; start < a.vocab; start += block) {
      const int64_t stop = start + block < a.vocab ? start + block : a.vocab;
      vf most = splat(-INFINITY);
      for (int64_t j = start; j < stop; j += W) {
        const int64_t n = stop - j;
        const vf x = load(row + j, n) + load(a.bias + j, n);
        most = larger(n >= W ? x : (lanes() < splat_i(n) ? x : most), most);
      }
      const float now = largest(most);
      if (now > top) {
        sum *= std::exp(top - now);
        top = now;
      }
      vf part{};
      const float base = top == -INFINITY ? 0.0f : top;  // all logits so far are -inf, and their exponentials 0
      for (int64_t j = start; j < stop; j += W) {
        const int64_t n = stop - j;
        const vf e = exp(load(row + j, n) + load(a.bias + j, n) - base);
        part += n >= W ? e : (lanes() < splat_i(n) ? e : vf{});
      }
      sum += total(part);
    }
    const float at_label = load(row + label, 1)[0] + load(a.bias + label, 1)[0];
    a.lse[r] = top + std::log(sum);
    a.loss[r] = a.lse[r] - at_label;
    bool first = at_label == top;  // the prediction is the first of the largest, as argmax has it
    for (int64_t j = 0; first && j < label; ++j) first = load(row + j, 1)[0] + load(a.bias + j, 1)[0] != top;
    a.correct[r] = first;
    if (!a.gradient) continue;
    const float factor = 1.0f / sum;
    for (int64_t j = 0; j < a.vocab; j += W) {
      const int64_t n = a.vocab - j;
      vf d = exp(load(row + j, n) + load(a.bias + j, n) - top) * factor;
      if (label >= j && label < j + W) d[label - j] -= 1.0f;
      store(row + j, d, n);
      store(dbias + j, load(dbias + j, n) + d, n);
    }
    memset(row + a.vocab, 0, sizeof(T) * (a.stride - a.vocab));
  }
}

template <class T>
static void reduce_blocks(const float* partial, T* out, int64_t blocks, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += W) {
    vf sum{};
    for (int64_t b = 0; b < blocks; ++b) sum += load(partial + b * stride + j, end - j);
    store(out + j, sum, end - j);
  }
}
