// unit: portable avx2 avx512 neon
// SiLU, GELU (erf and tanh) and ReLU of the first half of the last axis times the second half, forward and backward.
#include "vec.hpp"

LZ_BEGIN

namespace {

constexpr int64_t GRAIN = 4 << 10;

enum Kind : int64_t { SILU, GELU, GELU_TANH, RELU };

constexpr float ROOT_HALF = 0.70710678118654752f, INV_ROOT_TAU = 0.39894228040143268f;
constexpr float TANH_A = 0.79788456080286536f, TANH_B = 0.044715f;

// 1 / (1 + e^-x); exactly 0 far below, where the exponential overflows.
LZ_INLINE vf logistic(vf x) {
  vf down = 1.0f + exp_normal(vmin(vmax(-x, splat(-87.0f)), splat(88.8f)));
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
  float32x4_t d = bit_cast<float32x4_t>(down), r = vrecpeq_f32(d);  // a third of the time of a division
  r = vmulq_f32(r, vrecpsq_f32(d, r));
  r = vmulq_f32(r, vrecpsq_f32(d, r));
  return bit_cast<vf>(r);
#elif LZ_LANES == 16 && !defined(LZ_ISA_portable)
  __m512 d = bit_cast<__m512>(down), r = _mm512_rcp14_ps(d);
  __mmask16 finite = _mm512_cmp_ps_mask(d, _mm512_set1_ps(__builtin_inff()), _CMP_NEQ_UQ);  // 1 / inf is 0 already
  return bit_cast<vf>(_mm512_mask_fmadd_ps(r, finite, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1.0f)), r));
#else
  return 1.0f / down;
#endif
}

// The gate's activation and its derivative.
template <int K> LZ_INLINE vf value(vf g) {
  if (K == SILU) return g * logistic(g);
  if (K == GELU) return 0.5f * g * (1.0f + verf(g * ROOT_HALF));
  if (K == GELU_TANH) {  // (1 + tanh u) / 2 is the logistic function of 2u
    vf u = TANH_A * (g + TANH_B * g * g * g);
    return g * logistic(2.0f * u);
  }
  return select((g > 0.0f) | (g != g), g, vf{});
}

template <int K> LZ_INLINE vf slope(vf g) {
  if (K == SILU) {
    vf s = logistic(g);
    return s * (1.0f + g * (1.0f - s));
  }
  if (K == GELU) return 0.5f * (1.0f + verf(g * ROOT_HALF)) + g * INV_ROOT_TAU * vexp(-0.5f * g * g);
  if (K == GELU_TANH) {
    vf u = TANH_A * (g + TANH_B * g * g * g);
    vf s = logistic(2.0f * u);
    return s + g * s * (1.0f - s) * 2.0f * TANH_A * (1.0f + 3.0f * TANH_B * g * g);
  }
  return select(g > 0.0f, splat(1.0f), vf{});
}

template <int K, class T> LZ_INLINE void forward_row(const T* gate, const T* up, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {  // two at a time: the chain of one waits for itself
    vf a = value<K>(load(gate + i)) * load(up + i), b = value<K>(load(gate + i + W)) * load(up + i + W);
    store(out + i, a);
    store(out + i + W, b);
  }
  for (; i + W <= n; i += W) store(out + i, value<K>(load(gate + i)) * load(up + i));
  if (i < n) store_part(out + i, value<K>(load_part(gate + i, n - i)) * load_part(up + i, n - i), n - i);
}

template <int K, class T>
LZ_INLINE void backward_row(const T* grad, const T* gate, const T* up, int64_t n, T* dgate, T* dup) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    vf d = load(grad + i), g = load(gate + i);
    store(dgate + i, d * load(up + i) * slope<K>(g));
    store(dup + i, d * value<K>(g));
  }
  if (i < n) {
    int64_t m = n - i;
    vf d = load_part(grad + i, m), g = load_part(gate + i, m);
    store_part(dgate + i, d * load_part(up + i, m) * slope<K>(g), m);
    store_part(dup + i, d * value<K>(g), m);
  }
}

// Work is cut by elements: one long row is shared by the threads too, at multiples of a cache line.
template <int K, class T> void forward(const Tensor& x, const Tensor& out, int64_t rows, int64_t n, int threads) {
  RowMap from(x), to(out);
  const T* in = x.as<T>();
  T* result = out.as<T>();
  int64_t pieces = n / GRAIN > 1 ? n / GRAIN : 1, step = ((n + pieces - 1) / pieces + 63) / 64 * 64;
  pieces = (n + step - 1) / step;
  int64_t grain = (GRAIN + n - 1) / n;
  parallel_range(rows * pieces, pieces > 1 ? 1 : grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int64_t r = item / pieces, at = item % pieces * step, m = n - at < step ? n - at : step;
      const T* row = in + from(r) + at;
      forward_row<K>(row, row + n, m, result + to(r) + at);
    }
  });
}

// gated(x, out, kind)
Status gated(Call& c) {
  const Tensor &x = c.t(0), &out = c.t(1);
  if (x.ndim == 0 || x.ndim != out.ndim || x.dtype != out.dtype || x.size(-1) != 2 * out.size(-1))
    return "out must be as x, with half its width";
  for (int i = 0; i + 1 < x.ndim; ++i)
    if (x.shape[i] != out.shape[i]) return "out must be as x, with half its width";
  if (x.count() == 0) return nullptr;
  if (x.shape[x.ndim - 1] > 1 && x.stride[x.ndim - 1] != 1) return RELAYOUT;
  if (!out.dense_rows()) return RELAYOUT;
  int64_t n = out.size(-1), rows = out.rows();
  LZ_FLOATS(x.dtype, {
    switch (c.i(2)) {
      case SILU: forward<SILU, T>(x, out, rows, n, c.threads); return nullptr;
      case GELU: forward<GELU, T>(x, out, rows, n, c.threads); return nullptr;
      case GELU_TANH: forward<GELU_TANH, T>(x, out, rows, n, c.threads); return nullptr;
      case RELU: forward<RELU, T>(x, out, rows, n, c.threads); return nullptr;
      default: return "no such activation";
    }
  });
  return "dtype must be float32, bfloat16 or float16";
}

template <int K, class T> void backward(const Tensor& g, const Tensor& x, const Tensor& dx, int64_t n, int threads) {
  parallel_range(x.rows(), (GRAIN + n - 1) / n, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x.as<T>() + r * 2 * n;
      T* to = dx.as<T>() + r * 2 * n;
      backward_row<K>(g.as<T>() + r * n, row, row + n, n, to, to + n);
    }
  });
}

// gated_grad(grad, x, dx, kind)
Status gated_grad(Call& c) {
  const Tensor &g = c.t(0), &x = c.t(1), &dx = c.t(2);
  if (!x.contiguous() || !g.contiguous() || !dx.contiguous()) return RELAYOUT;
  if (x.ndim == 0 || !dx.same_shape(x) || dx.dtype != x.dtype || g.dtype != x.dtype) return "dx must be as x";
  if (g.ndim != x.ndim || 2 * g.size(-1) != x.size(-1) || 2 * g.count() != x.count()) return "grad must be half of x";
  int64_t n = g.size(-1);
  if (g.count() == 0) return nullptr;
  LZ_FLOATS(x.dtype, {
    switch (c.i(3)) {
      case SILU: backward<SILU, T>(g, x, dx, n, c.threads); return nullptr;
      case GELU: backward<GELU, T>(g, x, dx, n, c.threads); return nullptr;
      case GELU_TANH: backward<GELU_TANH, T>(g, x, dx, n, c.threads); return nullptr;
      case RELU: backward<RELU, T>(g, x, dx, n, c.threads); return nullptr;
      default: return "no such activation";
    }
  });
  return "dtype must be float32, bfloat16 or float16";
}

}  // namespace

LZ_EXPORTS(gated) = {
    {"gated", "TTi", &gated},
    {"gated_grad", "TTTi", &gated_grad},
    {nullptr, nullptr, nullptr},
};

LZ_END
