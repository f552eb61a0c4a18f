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

// gelu(a) * b of (a, b) = x + bias, rows of 2 * width columns, all in fp32. Its gradients: g * b * gelu'(a) and g * gelu(a).

template <class T>
static void bias_geglu(const T* x, const T* bias, T* y, int64_t width, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T *value = x + 2 * r * width, *gate = value + width;
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j;
      const vf a = load(value + j, n) + load(bias + j, n), b = load(gate + j, n) + load(bias + width + j, n);
      store(y + r * width + j, a * normal(a).cdf * b, n);
    }
  }
}

template <class T>
static void bias_geglu_backward(const T* grad, const T* x, const T* bias, T* dx, float* dbias, int64_t width,
                                int64_t begin, int64_t end) {
  memset(dbias, 0, sizeof(float) * 2 * width);
  for (int64_t r = begin; r < end; ++r) {
    const T *value = x + 2 * r * width, *gate = value + width;
    T *dvalue = dx + 2 * r * width, *dgate = dvalue + width;
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j;
      const vf a = load(value + j, n) + load(bias + j, n), b = load(gate + j, n) + load(bias + width + j, n);
      const vf g = load(grad + r * width + j, n);
      const Normal law = normal(a);
      const vf da = g * b * (law.cdf + a * law.bell * 0.398942280f), db = g * a * law.cdf;
      store(dvalue + j, da, n);
      store(dgate + j, db, n);
      store(dbias + j, load(dbias + j, n) + da, n);
      store(dbias + width + j, load(dbias + width + j, n) + db, n);
    }
  }
}
