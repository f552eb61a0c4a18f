// The element-wise kernels of a layer as C functions; a part of kernels.cpp.

const char* bias_gelu(int type, bool backwards, const void* x, const void* bias, void* y, int64_t rows, int64_t width) {
  return activate<false>(type, backwards, x, bias, y, rows, width);
}

const char* bias_gelu_backward(int type, bool backwards, const void* grad, const void* x, const void* bias, void* dx,
                               float* partial, void* dbias, int64_t rows, int64_t width) {
  return activate_backward<false>(type, backwards, grad, x, bias, dx, partial, dbias, rows, width);
}

const char* bias_geglu(int type, bool backwards, const void* x, const void* bias, void* y, int64_t rows, int64_t width) {
  return activate<true>(type, backwards, x, bias, y, rows, width);
}

const char* bias_geglu_backward(int type, bool backwards, const void* grad, const void* x, const void* bias, void* dx,
                                float* partial, void* dbias, int64_t rows, int64_t width) {
  return activate_backward<true>(type, backwards, grad, x, bias, dx, partial, dbias, rows, width);
}

const char* rotate(int type, bool backwards, const void* x, const float* cos, const float* sin, void* y, int64_t rows,
                   int64_t heads, int64_t half, bool back) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    std::string result;
    with_bool(aligned(half, {x, cos, sin, y}), [&](auto whole) {
      const int64_t tasks = 3 * heads * ((half + kGroup - 1) / kGroup);
      result = launch(column_grid(tasks * kGroup), kColumnThreads, backwards, [&] {
        rotate_heads<T, decltype(whole)::value>(static_cast<const T*>(x), cos, sin, back ? -1.0f : 1.0f, static_cast<T*>(y),
                                                rows, heads, half);
      });
    });
    return result;
  });
}

const char* dropout(int type, bool backwards, const void* x, void* y, int64_t rows, int64_t width, int64_t stream,
                    double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    std::string result;
    with_bool(aligned(width, {x, y}), [&](auto whole) {
      result = launch(column_grid(width), kColumnThreads, backwards, [&] {
        dropout_forward<T, decltype(whole)::value>(static_cast<const T*>(x), static_cast<T*>(y),
                                                   dropout_of(stream, p), seed, rows, width);
      });
    });
    return result;
  });
}

const char* layer_norm(int type, bool backwards, const void* x, const void* bias, const void* residual,
                       const void* weight, const void* shift, void* y, void* z, float* mean, float* rstd, int64_t rows,
                       int64_t width, double eps, int64_t stream, double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    const LayerNormRows<T> a{static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<const T*>(residual),
                             static_cast<const T*>(weight), static_cast<const T*>(shift), static_cast<T*>(y),
                             static_cast<T*>(z), mean, rstd, rows, width, static_cast<float>(eps)};
    std::string result;
    with_bool(aligned(width, {x, bias, residual, weight, shift, y, z}), [&](auto whole) {
      with_row_shape(width, [&](auto shape) {
        using S = decltype(shape);
        result = launch(dim3((rows + S::rows - 1) / S::rows), dim3(S::threads, S::rows), backwards, [&] {
          layer_norm_forward<T, S::threads, S::groups, decltype(whole)::value>(a, dropout_of(stream, p), seed);
        });
      });
    });
    return result;
  });
}

// second: another gradient of y, or (of_z) that of z; partial [3, 3, width]; vectors: dbias, dweight, dshift
const char* layer_norm_backward(int type, bool backwards, const void* grad, const void* second, bool of_z, const void* z,
                                const void* weight, const float* mean, const float* rstd, void* dx, void* dresidual,
                                float* partial, void* dbias, void* dweight, void* dshift, int64_t rows, int64_t width,
                                int64_t stream, double p, const int64_t* seed) {
  return with_type(type, [&](auto t) {
    using T = decltype(t);
    const LayerNormGradientRows<T> a{static_cast<const T*>(grad), static_cast<const T*>(second), static_cast<const T*>(z),
                                     static_cast<const T*>(weight), of_z, mean, rstd, static_cast<T*>(dx),
                                     static_cast<T*>(dresidual), partial, rows, width};
    std::string result;
    with_bool(aligned(width, {grad, second, z, weight, dx, dresidual}), [&](auto whole) {
      with_block_shape(width, [&](auto shape) {
        using S = decltype(shape);
        result = launch(kBlocks, S::threads, backwards, [&] {
          layer_norm_gradient<T, S::threads, S::groups, decltype(whole)::value>(a, dropout_of(stream, p), seed);
        });
      });
    });
    const LineSums<T, 3> sums{{static_cast<T*>(dbias), static_cast<T*>(dweight), static_cast<T*>(dshift)}};
    return result.empty() ? reduce(backwards, partial, sums, kBlocks, 3 * width, width) : result;
  });
}
