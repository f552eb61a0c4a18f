// Dropout alone, without fusion.

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

// z = residual + dropout(x + bias) is rounded to the tensor's type first, and the norm is of the rounded z, so that
// forward and backward (which reads the stored z) are of the same function. Statistics are fp32.

template <class T>
static void dropout_add_layer_norm(LayerNormRows<T> a, Dropout dropout, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  const int64_t width = a.width, padded = (width + W - 1) / W * W, groups = (width + 7) / 8;
  scratch.reset(4 * padded + groups + 8 * W + 256);
  float* line = scratch.take<float>(padded);
  uint8_t* bits = scratch.take<uint8_t>(groups + 2 * W + 8);
  const float inverse = 1.0f / static_cast<float>(width);
  for (int64_t r = begin; r < end; ++r) {
    if (dropout.threshold) keep_bits(dropout, r, 0, groups, bits);
    vf sum{};
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j, at = r * width + j;
      vf branch = load(a.x + at, n) + load(a.bias + j, n);
      if (dropout.threshold) branch = keep(branch * dropout.scale, bits, j);
      const vf value = rounded(load(a.residual + at, n) + branch, a.z);
      store(a.z + at, value, n);
      store(line + j, value);
      sum += value;
    }
    const float mu = total(sum) * inverse;
    vf square{};
    for (int64_t j = 0; j < width; j += W) {
      const vf centred = load(line + j) - mu;
      square += j + W <= width ? centred * centred : (lanes() < splat_i(width - j) ? centred * centred : vf{});
    }
    const float scale = 1.0f / std::sqrt(total(square) * inverse + a.eps);
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j;
      store(a.y + r * width + j, (load(line + j) - mu) * scale * load(a.weight + j, n) + load(a.shift + j, n), n);
    }
    a.mean[r] = mu, a.rstd[r] = scale;
  }
}

// With xhat = (z - mean) * rstd and g = grad * weight:
//   dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) + gradient of z; dresidual = dz; dx = dropout'(dz).
template <class T>
static void dropout_add_layer_norm_backward(const LayerNormGradientRows<T>& a, const Dropout& dropout, float* sums,
                                            int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  const int64_t width = a.width, groups = (width + 7) / 8;
  scratch.reset(groups + 8 * W + 256);
  uint8_t* bits = scratch.take<uint8_t>(groups + 2 * W + 8);
  float *dbias = sums, *dweight = sums + width, *dshift = sums + 2 * width;
  memset(sums, 0, sizeof(float) * 3 * width);
  const float inverse = 1.0f / static_cast<float>(width);
  const T *of_y = a.of_z ? nullptr : a.second, *of_z = a.of_z ? a.second : nullptr;
  for (int64_t r = begin; r < end; ++r) {
    const float mu = a.mean[r], scale = a.rstd[r];
    vf sum_g{}, sum_gx{};
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j, at = r * width + j;
      const vf xhat = (load(a.z + at, n) - mu) * scale;
      vf dy = load(a.grad + at, n);
      if (of_y) dy += load(of_y + at, n);
      const vf g = dy * load(a.weight + j, n);
      sum_g += g, sum_gx += g * xhat;  // lanes past the end have g = 0
      store(dweight + j, load(dweight + j, n) + dy * xhat, n);
      store(dshift + j, load(dshift + j, n) + dy, n);
    }
    const float mean_g = total(sum_g) * inverse, mean_gx = total(sum_gx) * inverse;
    if (dropout.threshold) keep_bits(dropout, r, 0, groups, bits);
    for (int64_t j = 0; j < width; j += W) {
      const int64_t n = width - j, at = r * width + j;
      const vf xhat = (load(a.z + at, n) - mu) * scale;
      vf dy = load(a.grad + at, n);
      if (of_y) dy += load(of_y + at, n);
      vf dz = (dy * load(a.weight + j, n) - mean_g - xhat * mean_gx) * scale;
      if (of_z) dz += load(of_z + at, n);
      store(a.dresidual + at, dz, n);
      const vf dx = dropout.threshold ? keep(dz * dropout.scale, bits, j) : dz;
      if (a.dx) store(a.dx + at, dx, n);
      store(dbias + j, load(dbias + j, n) + dx, n);
    }
  }
}
