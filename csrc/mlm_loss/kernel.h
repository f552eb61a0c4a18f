// One row of logits: a first pass finds the largest and the sum of exponentials (block by block, in cache), a second
// overwrites the logits with their gradient. Ignored rows get zeros, and so does the padding from `vocab` to `stride`, which is
// not part of the distribution.

template <class T>
static void mlm_loss(T* logits, const T* bias, const int64_t* labels, float* loss, float* lse, int32_t* correct,
                     float* dbias, bool gradient, int64_t vocab, int64_t stride, int64_t begin, int64_t end) {
  constexpr int64_t block = 32 * W;
  if (dbias) memset(dbias, 0, sizeof(float) * stride);
  for (int64_t r = begin; r < end; ++r) {
    T* row = logits + r * stride;
    const int64_t label = labels[r];
    loss[r] = 0, lse[r] = 0, correct[r] = 0;
    if (label == kIgnore) {
      if (gradient) memset(row, 0, sizeof(T) * stride);
      continue;
    }
    float top = -INFINITY, sum = 0;
    for (int64_t start = 0; start < vocab; start += block) {
      const int64_t stop = start + block < vocab ? start + block : vocab;
      vf most = splat(-INFINITY);
      for (int64_t j = start; j < stop; j += W) {
        const int64_t n = stop - j;
        const vf x = load(row + j, n) + load(bias + j, n);
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
        const vf e = exp(load(row + j, n) + load(bias + j, n) - base);
        part += n >= W ? e : (lanes() < splat_i(n) ? e : vf{});
      }
      sum += total(part);
    }
    const float at_label = load(row + label, 1)[0] + load(bias + label, 1)[0];
    lse[r] = top + std::log(sum);
    loss[r] = lse[r] - at_label;
    bool first = at_label == top;  // the prediction is the first of the largest, as argmax has it
    for (int64_t j = 0; first && j < label; ++j) first = load(row + j, 1)[0] + load(bias + j, 1)[0] != top;
    correct[r] = first;
    if (!gradient) continue;
    const float factor = 1.0f / sum;
    for (int64_t j = 0; j < vocab; j += W) {
      const int64_t n = vocab - j;
      vf d = exp(load(row + j, n) + load(bias + j, n) - top) * factor;
      if (label >= j && label < j + W) d[label - j] -= 1.0f;
      store(row + j, d, n);
      if (dbias) store(dbias + j, load(dbias + j, n) + d, n);
    }
    memset(row + vocab, 0, sizeof(T) * (stride - vocab));
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
