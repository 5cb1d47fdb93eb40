// unit: portable avx2 avx512 neon
// SiLU, GELU (erf and tanh) and ReLU of the first half of the last axis times the second half, forward and backward.
#include "activation.hpp"
#include "pair.hpp"

LZ_BEGIN

namespace {

constexpr int64_t GRAIN = 4 << 10;  // elements a thread should have at least
constexpr int64_t PIECE = 1 << 10;  // elements of a row that stay together

constexpr int64_t AHEAD = 1 << 10;  // bytes that are asked for before they are needed

// One form for each dtype, wherever in a row an element stands: its result does not depend on its neighbours.
template <int K, class T> struct Gate {
  static LZ_INLINE vf of(vf g) { return value<K>(g); }
};
template <int K> struct Gate<K, bf16> {
  static LZ_INLINE vf of(vf g) { return brief_value<K>(g); }
};

template <int K, class T> LZ_INLINE void forward_row(const T* gate, const T* up, int64_t n, T* out) {
  constexpr int64_t far = AHEAD / int64_t(sizeof(T));
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    if (sizeof(T) == 2) fetch2(gate + i + far), fetch2(up + i + far), claim2(out + i + far);
    const pair g = load2(gate + i), u = load2(up + i);
    store2(out + i, pair{Gate<K, T>::of(g.a), Gate<K, T>::of(g.b)} * u);
  }
  for (; i + W <= n; i += W) store(out + i, Gate<K, T>::of(load(gate + i)) * load(up + i));
  if (i < n) store_part(out + i, Gate<K, T>::of(load_part(gate + i, n - i)) * load_part(up + i, n - i), n - i);
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
  int64_t step = n < PIECE ? n : PIECE, pieces = (n + step - 1) / step;
  parallel_range(rows * pieces, (GRAIN + step - 1) / step, threads, [&](int64_t begin, int64_t end) {
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
