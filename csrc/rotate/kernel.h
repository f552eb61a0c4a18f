// Queries and keys rotated: column i of a head with column i + half, by the angles of the row's token, in fp32.

template <class T>
static void rotate(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t heads, int64_t half,
                   int64_t begin, int64_t end) {
  const int64_t width = 6 * heads * half, turned = 4 * heads * half;
  for (int64_t r = begin; r < end; ++r) {
    const T* from = x + r * width;
    T* to = y + r * width;
    for (int64_t at = 0; at < turned; at += 2 * half) {
      for (int64_t j = 0; j < half; j += W) {
        const int64_t n = half - j, first = at + j, second = first + half;
        const vf c = load(cos + r * half + j, n), s = load(sin + r * half + j, n) * sign;
        const vf a = load(from + first, n), b = load(from + second, n);
        store(to + first, a * c - b * s, n);
        store(to + second, b * c + a * s, n);
      }
    }
    memcpy(to + turned, from + turned, sizeof(T) * (width - turned));
  }
}
