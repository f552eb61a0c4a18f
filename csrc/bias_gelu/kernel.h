// gelu(z) = z * cdf(z), gelu'(z) = cdf(z) + z * density(z), z = x + bias, all in fp32.

template <class T>
static void bias_gelu(const T* x, const T* bias, T* y, int64_t width, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j;
      const vf z = load(x + r * width + j, n) + load(bias + j, n);
      store(y + r * width + j, z * normal(z).cdf, n);
    }
  }
}

template <class T>
static void bias_gelu_backward(const T* grad, const T* x, const T* bias, T* dx, float* dbias, int64_t width,
                               int64_t begin, int64_t end) {
  memset(dbias, 0, sizeof(float) * width);
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j, at = r * width + j;
      const vf z = load(x + at, n) + load(bias + j, n);
      const Normal law = normal(z);
      const vf d = load(grad + at, n) * (law.cdf + z * law.bell * 0.398942280f);
      store(dx + at, d, n);
      store(dbias + j, load(dbias + j, n) + d, n);
    }
  }
}
