// Sums over a row, and its mean and deviation: what the forward and the backward norms share.
#pragma once
#include "vec.hpp"

namespace lz {
namespace LZ_ISA {
namespace {

constexpr int64_t GRAIN = 16 << 10;  // elements a thread should have at least

struct Sums {
  vf a = {}, b = {}, c = {}, d = {};
  LZ_INLINE float all() const { return sum((a + b) + (c + d)); }
};

template <class T> LZ_INLINE float squares(const T* x, int64_t n) {
  Sums s;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    vf p = load(x + i), q = load(x + i + W), r = load(x + i + 2 * W), t = load(x + i + 3 * W);
    s.a = fma(p, p, s.a), s.b = fma(q, q, s.b), s.c = fma(r, r, s.c), s.d = fma(t, t, s.d);
  }
  for (; i + W <= n; i += W) {
    vf p = load(x + i);
    s.a = fma(p, p, s.a);
  }
  if (i < n) {
    vf p = load_part(x + i, n - i);
    s.b = fma(p, p, s.b);
  }
  return s.all();
}

LZ_INLINE float rms_scale(float squares, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(squares / float(n) + eps);
}

template <class T> LZ_INLINE float total(const T* x, int64_t n) {
  Sums s;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    s.a += load(x + i), s.b += load(x + i + W), s.c += load(x + i + 2 * W), s.d += load(x + i + 3 * W);
  for (; i + W <= n; i += W) s.a += load(x + i);
  if (i < n) s.b += load_part(x + i, n - i);
  return s.all();
}

// Sums of the distances from a number, and of their squares.
template <class T> LZ_INLINE void distances(const T* x, int64_t n, float from, float* first, float* second) {
  vf centre = splat(from);
  Sums s;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    vf p = load(x + i) - centre, q = load(x + i + W) - centre;
    s.a += p, s.b += q, s.c = fma(p, p, s.c), s.d = fma(q, q, s.d);
  }
  for (; i + W <= n; i += W) {
    vf p = load(x + i) - centre;
    s.a += p, s.c = fma(p, p, s.c);
  }
  float rest = 0.0f, square = 0.0f;
  for (; i < n; ++i) {
    float p = to_float(x[i]) - from;
    rest += p, square += p * p;
  }
  *first = (sum(s.a + s.b) + rest) / float(n);
  *second = (sum(s.c + s.d) + square) / float(n);
}

// Mean and 1 / deviation in one pass, around the mean of the row's beginning. Where that lies so far off that the difference
// of the sums would lose digits, a second pass around the mean itself.
template <class T> LZ_INLINE void moments(const T* x, int64_t n, float eps, float* mean, float* scale) {
  int64_t m = n < 64 ? n : 64;
  float from = total(x, m) / float(m), first, second;
  distances(x, n, from, &first, &second);
  float variance = second - first * first;
  if (n > 64 && !(first * first < variance)) {
    from += first;
    distances(x, n, from, &first, &second);
    variance = second - first * first;
  }
  *mean = from + first;
  *scale = 1.0f / __builtin_sqrtf((variance < 0.0f ? 0.0f : variance) + eps);
}

LZ_INLINE Status rows_of(const Tensor& x, const Tensor& like, int64_t* rows) {
  if (x.ndim == 0 || !x.same_shape(like) || x.dtype != like.dtype) return "tensors must be alike";
  *rows = x.rows();
  return nullptr;
}

}  // namespace
}  // namespace LZ_ISA
}  // namespace lz
