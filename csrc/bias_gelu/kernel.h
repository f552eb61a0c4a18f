// gelu(z) = z * cdf(z), gelu'(z) = cdf(z) + z * density(z), z = x + bias, all in fp32. With a gate rows of x have 2 * width
// columns (a, b) and the result is gelu(a) * b; its gradients are g * b * gelu'(a) and g * gelu(a).

template <class T, bool Gate>
static void activate(const T* x, const T* bias, T* y, int64_t width, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* value = x + (1 + Gate) * r * width;
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j;
      const vf z = load(value + j, n) + load(bias + j, n);
      vf result = z * normal(z).cdf;
      if constexpr (Gate) result *= load(value + width + j, n) + load(bias + width + j, n);
      store(y + r * width + j, result, n);
    }
  }
}

template <class T, bool Gate>
static void activate_backward(const T* grad, const T* x, const T* bias, T* dx, float* dbias, int64_t width,
                              int64_t begin, int64_t end) {
  memset(dbias, 0, sizeof(float) * (1 + Gate) * width);
  for (int64_t r = begin; r < end; ++r) {
    const T* value = x + (1 + Gate) * r * width;
    T* dvalue = dx + (1 + Gate) * r * width;
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j;
      const vf z = load(value + j, n) + load(bias + j, n);
      vf g = load(grad + r * width + j, n);
      const Normal law = normal(z);
      const vf slope = law.cdf + z * law.bell * 0.398942280f;
      if constexpr (Gate) {
        const vf db = g * z * law.cdf;
        store(dvalue + width + j, db, n);
        store(dbias + width + j, load(dbias + width + j, n) + db, n);
        g *= load(value + width + j, n) + load(bias + width + j, n);
      }
      const vf d = g * slope;
      store(dvalue + j, d, n);
      store(dbias + j, load(dbias + j, n) + d, n);
    }
  }
}
