// unit: portable avx2 avx512 neon
// Gradients of the norms. Rows are cut into as many runs as the caller says; each run sums its own gradients of weight and
// bias, so that the result does not depend on threads. Terms of both signs are added, along a row and over the rows, and where
// they cancel the rounding of each outlasts the result: so float32 is summed over rows in double, and computed in double as
// well up to a size at which the call costs more than the arithmetic. Beyond it double would take three times as long.
#include "norm.hpp"

LZ_BEGIN

namespace {

// As many doubles as a vector of float has lanes: two registers.
typedef double vd2 __attribute__((vector_size(4 * LZ_LANES)));
struct vd {
  vd2 a, b;
};
LZ_INLINE vd operator+(vd x, vd y) { return {x.a + y.a, x.b + y.b}; }
LZ_INLINE vd operator-(vd x, vd y) { return {x.a - y.a, x.b - y.b}; }
LZ_INLINE vd operator*(vd x, vd y) { return {x.a * y.a, x.b * y.b}; }
LZ_INLINE vd operator+(vd x, double y) { return {x.a + y, x.b + y}; }
LZ_INLINE vd operator-(vd x, double y) { return {x.a - y, x.b - y}; }
LZ_INLINE vd operator*(vd x, double y) { return {x.a * y, x.b * y}; }

// Half a vector of floats at p as doubles, and back. The compiler's own conversion of half a register goes number by number.
LZ_INLINE vd2 half_at(const float* p) {
#if defined(LZ_ISA_portable) || defined(LZ_EMULATED)
  vd2 v;
  for (int i = 0; i < W / 2; ++i) v[i] = double(p[i]);
  return v;
#elif LZ_LANES == 16
  return bit_cast<vd2>(_mm512_cvtps_pd(_mm256_loadu_ps(p)));
#elif LZ_LANES == 8
  return bit_cast<vd2>(_mm256_cvtps_pd(_mm_loadu_ps(p)));
#elif defined(__aarch64__)
  return bit_cast<vd2>(vcvt_f64_f32(vld1_f32(p)));
#else
  return vd2{double(p[0]), double(p[1])};
#endif
}
LZ_INLINE void put_half(float* p, vd2 v) {
#if defined(LZ_ISA_portable) || defined(LZ_EMULATED)
  for (int i = 0; i < W / 2; ++i) p[i] = float(v[i]);
#elif LZ_LANES == 16
  _mm256_storeu_ps(p, _mm512_cvtpd_ps(bit_cast<__m512d>(v)));
#elif LZ_LANES == 8
  _mm_storeu_ps(p, _mm256_cvtpd_ps(bit_cast<__m256d>(v)));
#elif defined(__aarch64__)
  vst1_f32(p, vcvt_f32_f64(bit_cast<float64x2_t>(v)));
#else
  p[0] = float(v[0]), p[1] = float(v[1]);
#endif
}

constexpr int64_t EXACT = 1 << 18;  // numbers of float32 up to which everything is computed in double

// The vector of a type that is computed in, and what gradients of T are summed in over rows.
template <class N> struct Vector { typedef vf type; };
template <> struct Vector<double> { typedef vd type; };
template <class T> struct Sum { typedef float type; };
template <> struct Sum<float> { typedef double type; };

// What lies at p, as wide as the first argument: a vector or a single number.
template <class T> LZ_INLINE vf at(vf, const T* p) { return load(p); }
LZ_INLINE vd at(vd, const float* p) { return {half_at(p), half_at(p + W / 2)}; }
template <class T> LZ_INLINE float at(float, const T* p) { return to_float(*p); }
LZ_INLINE double at(double, const float* p) { return double(*p); }
template <class T> LZ_INLINE void put(T* p, vf v) { store(p, v); }
LZ_INLINE void put(float* p, vd v) { put_half(p, v.a), put_half(p + W / 2, v.b); }
template <class T> LZ_INLINE void put(T* p, float v) { *p = From<T>::of(v); }
LZ_INLINE void put(float* p, double v) { *p = float(v); }
template <class N, class V> LZ_INLINE void add_at(N* p, V v) {
  V before;
  memcpy(&before, p, sizeof before);
  v = v + before;
  memcpy(p, &v, sizeof v);
}
LZ_INLINE void add_at(double* p, vd v) { add_at(p, v.a), add_at(p + W / 2, v.b); }  // whole, it would go through the stack
LZ_INLINE void add_at(double* p, float v) { *p += double(v); }
LZ_INLINE void add_at(double* p, vf v) {
  float lane[W];
  memcpy(lane, &v, sizeof v);
  add_at(p, vd{half_at(lane), half_at(lane + W / 2)});
}
LZ_INLINE float lanes(vf v) { return sum(v); }
LZ_INLINE double lanes(vd v) {
  double lane[W / 2];
  vd2 both = v.a + v.b;
  memcpy(lane, &both, sizeof both);
  for (int half = W / 4; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}
LZ_INLINE float root(float x) { return __builtin_sqrtf(x); }
LZ_INLINE double root(double x) { return __builtin_sqrt(x); }

// A sum along a row, of vectors and of the single numbers at its end.
template <class N> struct Along {
  typename Vector<N>::type vectors = {};
  N rest = 0;
  LZ_INLINE void operator+=(typename Vector<N>::type v) { vectors = vectors + v; }
  LZ_INLINE void operator+=(N v) { rest += v; }
  LZ_INLINE N all() const { return rest + lanes(vectors); }
};

// f(what lies there, i) along a row: vectors, then the single numbers that are left.
template <class N, class T, class F> LZ_INLINE void each(const T* x, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(at(typename Vector<N>::type{}, x + i), i);
  for (; i < n; ++i) f(at(N(0), x + i), i);
}

// run(nought of the type to compute in)
template <class T, class F> LZ_INLINE void in_width(int64_t numbers, const F& run) {
  if constexpr (sizeof(T) == 4) {
    if (numbers <= EXACT) return run(0.0);
  }
  run(0.0f);
}

constexpr const char* SUMS = "sums of gradients must be [parts, n], in float64 for float32 and in float32 for the others";

// Fills a run's sums with noughts.
template <class N> LZ_INLINE N* cleared(const Tensor& sums, int64_t part, int64_t n) {
  if (!sums) return nullptr;
  N* found = sums.as<N>() + part * n;
  memset(found, 0, size_t(n) * sizeof(N));
  return found;
}

LZ_INLINE bool sums_fit(const Tensor& sums, const Tensor& x) {
  return sums.ndim == 2 && sums.size(0) >= 1 && sums.size(1) == x.size(-1) && sums.dtype == (x.dtype == F32 ? F64 : F32);
}

// rms_norm_grad(grad, grad of the stream or None, x, float weight or None, number added, eps, dx, sums of dweight or None)
Status rms_norm_grad(Call& c) {
  const Tensor &g = c.t(0), &also = c.t(1), &x = c.t(2), &w = c.t(3), &dx = c.t(6), &dw = c.t(7);
  int64_t rows;
  if (Status why = rows_of(x, g, &rows)) return why;
  if (Status why = rows_of(x, dx, &rows)) return why;
  if (!x.contiguous() || !g.contiguous() || !dx.contiguous() || (w && !w.contiguous()) || (dw && !dw.contiguous()))
    return RELAYOUT;
  if (also && !also.contiguous()) return RELAYOUT;
  if (also && (!also.same_shape(x) || also.dtype != x.dtype)) return "the stream's gradient must be as x";
  int64_t n = x.size(-1);
  if (w && (w.ndim != 1 || w.size(0) != n || w.dtype != F32)) return "weight must be float32, one number a column";
  if (dw && !sums_fit(dw, x)) return SUMS;
  if (n == 0 || rows == 0) return nullptr;
  int64_t parts = dw ? dw.size(0) : (rows < 64 ? rows : 64);
  LZ_FLOATS(x.dtype, {
    in_width<T>(rows * n, [&](auto nought) {
      typedef decltype(nought) N;
      N offset = N(c.f(4)), eps = N(c.f(5));
      parallel_parts(parts, c.threads, [&](int64_t part) {
        auto* sums = cleared<typename Sum<T>::type>(dw, part, n);
        const float* weight = w ? w.as<float>() : nullptr;
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
          const T *row = x.as<T>() + r * n, *grad = g.as<T>() + r * n, *more = also ? also.as<T>() + r * n : nullptr;
          T* to = dx.as<T>() + r * n;
          auto weighted = [&](auto gv, int64_t i) { return weight ? gv * (at(gv, weight + i) + offset) : gv; };
          Along<N> squares, product;
          each<N>(row, n, [&](auto v, int64_t i) { squares += v * v, product += weighted(at(v, grad + i), i) * v; });
          N scale = 1 / root(squares.all() / N(n) + eps), dot = product.all() * scale * scale / N(n);
          each<N>(row, n, [&](auto v, int64_t i) {
            auto gv = at(v, grad + i), d = (weighted(gv, i) - v * dot) * scale;
            if (more) d = d + at(v, more + i);
            put(to + i, d);
            if (sums) add_at(sums + i, gv * (v * scale));
          });
        }
      });
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

// layer_norm_grad(grad, x, float weight or None, eps, dx, sums of dweight [parts, n], sums of dbias [parts, n])
Status layer_norm_grad(Call& c) {
  const Tensor &g = c.t(0), &x = c.t(1), &w = c.t(2), &dx = c.t(4), &dw = c.t(5), &db = c.t(6);
  int64_t rows;
  if (Status why = rows_of(x, g, &rows)) return why;
  if (Status why = rows_of(x, dx, &rows)) return why;
  if (!x.contiguous() || !g.contiguous() || !dx.contiguous() || (w && !w.contiguous())) return RELAYOUT;
  if (!dw.contiguous() || !db.contiguous()) return RELAYOUT;
  int64_t n = x.size(-1);
  if (w && (w.ndim != 1 || w.size(0) != n || w.dtype != F32)) return "weight must be float32, one number a column";
  if (!sums_fit(dw, x) || !db.same_shape(dw) || db.dtype != dw.dtype) return SUMS;
  int64_t parts = dw.size(0);
  if (n == 0) return nullptr;
  LZ_FLOATS(x.dtype, {
    in_width<T>(rows * n, [&](auto nought) {
      typedef decltype(nought) N;
      N eps = N(c.f(3));
      parallel_parts(parts, c.threads, [&](int64_t part) {
        auto *sw = cleared<typename Sum<T>::type>(dw, part, n), *sb = cleared<typename Sum<T>::type>(db, part, n);
        const float* weight = w ? w.as<float>() : nullptr;
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
          const T *row = x.as<T>() + r * n, *grad = g.as<T>() + r * n;
          T* to = dx.as<T>() + r * n;
          auto weighted = [&](auto gv, int64_t i) { return weight ? gv * at(gv, weight + i) : gv; };
          Along<N> total, squares, sum_of_g, product;
          each<N>(row, n, [&](auto v, int64_t) { total += v; });
          N mean = total.all() / N(n);
          each<N>(row, n, [&](auto v, int64_t i) {
            auto h = v - mean, gw = weighted(at(v, grad + i), i);
            squares += h * h, sum_of_g += gw, product += gw * h;
          });
          N scale = 1 / root(squares.all() / N(n) + eps);
          N first = sum_of_g.all() / N(n), second = product.all() * scale / N(n);
          each<N>(row, n, [&](auto v, int64_t i) {
            auto gv = at(v, grad + i), h = (v - mean) * scale;
            put(to + i, (weighted(gv, i) - first - h * second) * scale);
            add_at(sw + i, gv * h), add_at(sb + i, gv);
          });
        }
      });
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

}  // namespace

LZ_EXPORTS(norm_grad) = {
    {"rms_norm_grad", "TOTOffTO", &rms_norm_grad},
    {"layer_norm_grad", "TTOfTTT", &layer_norm_grad},
    {nullptr, nullptr, nullptr},
};

LZ_END
