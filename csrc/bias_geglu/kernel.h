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
