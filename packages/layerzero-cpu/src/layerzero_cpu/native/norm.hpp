// Sums over a row, and its mean and deviation: what the forward and the backward norms share.
#pragma once
#include "pair.hpp"

namespace lz {
namespace LZ_ISA {
namespace {

constexpr int64_t GRAIN = 16 << 10;  // elements a thread should have at least

struct Sums {
  vf a = {}, b = {}, c = {}, d = {};
  LZ_INLINE float all() const { return sum((a + b) + (c + d)); }
};

// `out`: where the row's result will be written, claimed meanwhile; null where there is none.
template <class T> LZ_INLINE float squares(const T* x, int64_t n, T* out = nullptr) {
  Sums s;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    pair p = load2(x + i), q = load2(x + i + 2 * W);
    if (out) claim2(out + i), claim2(out + i + 2 * W);
    s.a = fma(p.a, p.a, s.a), s.b = fma(p.b, p.b, s.b), s.c = fma(q.a, q.a, s.c), s.d = fma(q.b, q.b, s.d);
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
  for (; i + 4 * W <= n; i += 4 * W) {
    pair p = load2(x + i), q = load2(x + i + 2 * W);
    s.a += p.a, s.b += p.b, s.c += q.a, s.d += q.b;
  }
  for (; i + W <= n; i += W) s.a += load(x + i);
  if (i < n) s.b += load_part(x + i, n - i);
  return s.all();
}

// Sums of the distances from a number, and of their squares.
template <class T>
LZ_INLINE void distances(const T* x, int64_t n, float from, float* first, float* second, T* out = nullptr) {
  vf centre = splat(from);
  Sums s, squared;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    pair p = load2(x + i), q = load2(x + i + 2 * W);
    if (out) claim2(out + i), claim2(out + i + 2 * W);
    p.a -= centre, p.b -= centre, q.a -= centre, q.b -= centre;
    s.a += p.a, s.b += p.b, s.c += q.a, s.d += q.b;
    squared.a = fma(p.a, p.a, squared.a), squared.b = fma(p.b, p.b, squared.b);
    squared.c = fma(q.a, q.a, squared.c), squared.d = fma(q.b, q.b, squared.d);
  }
  for (; i + W <= n; i += W) {
    vf p = load(x + i) - centre;
    s.a += p, squared.a = fma(p, p, squared.a);
  }
  float rest = 0.0f, square = 0.0f;
  for (; i < n; ++i) {
    float p = to_float(x[i]) - from;
    rest += p, square += p * p;
  }
  *first = (s.all() + rest) / float(n);
  *second = (squared.all() + square) / float(n);
}

// Mean and 1 / deviation in one pass, around the mean of the row's beginning. Where that lies so far off that the difference
// of the sums would lose digits, a second pass around the mean itself.
template <class T> LZ_INLINE void moments(const T* x, int64_t n, float eps, float* mean, float* scale, T* out = nullptr) {
  int64_t m = n < 64 ? n : 64;
  float from = total(x, m) / float(m), first, second;
  distances(x, n, from, &first, &second, out);
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
