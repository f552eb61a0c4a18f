// Dropout alone, for where nothing else is there to be fused with.

template <class T>
static void dropout(const T* x, T* y, int64_t width, Dropout dropout, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  const int64_t groups = (width + 7) / 8;
  scratch.reset(groups + 2 * W + 8 + 64);
  uint8_t* bits = scratch.take<uint8_t>(groups + 2 * W + 8);
  for (int64_t r = begin; r < end; ++r) {
    keep_bits(dropout, r, 0, groups, bits);
    for (int64_t j = 0; j < width; j += W)
      store(y + r * width + j, keep(load(x + r * width + j, width - j) * dropout.scale, bits, j), width - j);
  }
}
