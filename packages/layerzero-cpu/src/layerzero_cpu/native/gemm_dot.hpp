// Products of rows with rows: out[m][n] = sum over k of a[m][k] * b[n][k]. Both operands lie along k, so nothing is packed:
// the shape of a linear layer (weight [N, K]) and of query-key scores. `a` is float, b is converted as it is loaded.
#pragma once
#include "vec.hpp"

namespace lz {
namespace LZ_ISA {

#if LZ_LANES == 8 || (LZ_LANES == 4 && !defined(__aarch64__))
constexpr int DOT_ROWS = 2;  // 16 registers: 2 x 4 sums, 4 converted, 1 row
#else
constexpr int DOT_ROWS = 4;  // 32 registers
#endif

// The first n < W elements, zeros behind them, without reading further.
template <class T> LZ_INLINE vf load_edge(const T* p, int64_t n) {
#if LZ_LANES == 16 && !defined(LZ_ISA_portable) && defined(__AVX512BW__) && defined(__AVX512VL__)
  __mmask16 m = __mmask16((1u << n) - 1u);
  if constexpr (sizeof(T) == 4) return bit_cast<vf>(_mm512_maskz_loadu_ps(m, p));
  else return widen(bit_cast<vh>(_mm256_maskz_loadu_epi16(m, p)), T{});
#else
  return load_part(p, n);
#endif
}

typedef float v4 __attribute__((vector_size(16)));

// The sums of four vectors, side by side.
LZ_INLINE v4 sums(vf a, vf b, vf c, vf d) {
#if LZ_LANES == 4 && defined(__aarch64__) && !defined(LZ_ISA_portable)
  return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
#elif LZ_LANES >= 8 && !defined(LZ_ISA_portable)
#if LZ_LANES == 16
  auto fold = [](vf v) {
    return _mm256_add_ps(_mm512_castps512_ps256(bit_cast<__m512>(v)), _mm512_extractf32x8_ps(bit_cast<__m512>(v), 1));
  };
#else
  auto fold = [](vf v) { return bit_cast<__m256>(v); };
#endif
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
  return bit_cast<v4>(_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  return v4{sum(a), sum(b), sum(c), sum(d)};
#endif
}

// Two vectors from 2 W elements.
struct Pair {
  vf low, high;
};
template <class T> LZ_INLINE Pair load_pair(const T* p) { return {load(p), load(p + W)}; }
#if LZ_LANES == 4 && defined(__aarch64__) && !defined(LZ_ISA_portable)
// A bf16 is the upper half of a float: zipped with zeros it is one.
LZ_INLINE Pair load_pair(const bf16* p) {
  const uint16x8_t x = vld1q_u16(reinterpret_cast<const uint16_t*>(p)), zero = vdupq_n_u16(0);
  return {bit_cast<vf>(vzip1q_u16(zero, x)), bit_cast<vf>(vzip2q_u16(zero, x))};
}
LZ_INLINE Pair load_pair(const f16* p) {
  const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
}
#endif

// R rows of a with four rows of b over k elements; a is zero-padded to a multiple of W, b is not read beyond k.
// With few sums, the two halves of a step have their own, to hide the latency of the multiply-add. `ahead`: elements from
// here to what will be wanted next of the same stream, fetched into the second cache meanwhile; 0: nothing.
template <int R, class T>
LZ_INLINE void dot4(const float* a, int64_t a_step, const T* b0, const T* b1, const T* b2, const T* b3, int64_t k, v4* out,
                    int64_t ahead = 0) {
  constexpr bool APART = R <= 2 && DOT_ROWS != 2;
  vf s[R][4], t[R][4];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 4; ++n) s[r][n] = t[r][n] = splat(0.0f);
  int64_t i = 0;
  for (; i + 2 * W <= k; i += 2 * W) {
    if (ahead && i * int64_t(sizeof(T)) % 64 == 0) {
      __builtin_prefetch(b0 + i + ahead, 0, 2), __builtin_prefetch(b1 + i + ahead, 0, 2);
      __builtin_prefetch(b2 + i + ahead, 0, 2), __builtin_prefetch(b3 + i + ahead, 0, 2);
    }
    const Pair x0 = load_pair(b0 + i), x1 = load_pair(b1 + i), x2 = load_pair(b2 + i), x3 = load_pair(b3 + i);
    for (int r = 0; r < R; ++r) {
      const vf y = load(a + r * a_step + i);
      s[r][0] = fma(x0.low, y, s[r][0]), s[r][1] = fma(x1.low, y, s[r][1]);
      s[r][2] = fma(x2.low, y, s[r][2]), s[r][3] = fma(x3.low, y, s[r][3]);
    }
    for (int r = 0; r < R; ++r) {
      const vf y = load(a + r * a_step + i + W);
      vf* u = APART ? t[r] : s[r];
      u[0] = fma(x0.high, y, u[0]), u[1] = fma(x1.high, y, u[1]);
      u[2] = fma(x2.high, y, u[2]), u[3] = fma(x3.high, y, u[3]);
    }
  }
  for (; i < k; i += W) {
    const int64_t left = k - i;
    vf x0, x1, x2, x3;
    if (left >= W) x0 = load(b0 + i), x1 = load(b1 + i), x2 = load(b2 + i), x3 = load(b3 + i);
    else x0 = load_edge(b0 + i, left), x1 = load_edge(b1 + i, left), x2 = load_edge(b2 + i, left), x3 = load_edge(b3 + i, left);
    for (int r = 0; r < R; ++r) {
      const vf y = load(a + r * a_step + i);
      s[r][0] = fma(x0, y, s[r][0]), s[r][1] = fma(x1, y, s[r][1]);
      s[r][2] = fma(x2, y, s[r][2]), s[r][3] = fma(x3, y, s[r][3]);
    }
  }
  for (int r = 0; r < R; ++r) {
    if (APART)
      for (int n = 0; n < 4; ++n) s[r][n] = s[r][n] + t[r][n];
    out[r] = sums(s[r][0], s[r][1], s[r][2], s[r][3]);
  }
}

// One row with one row: a single stream, read in order, which the processor's own prefetching likes best.
template <class T> LZ_INLINE float dot1(const float* a, const T* b, int64_t k) {
  vf s[8];
  for (int n = 0; n < 8; ++n) s[n] = splat(0.0f);
  int64_t i = 0;
  for (; i + 8 * W <= k; i += 8 * W) {
    for (int64_t at = 0; at < int64_t(8 * W * sizeof(T)); at += 64) __builtin_prefetch(reinterpret_cast<const char*>(b + i) + 1536 + at);
    for (int n = 0; n < 8; n += 2) {
      const Pair x = load_pair(b + i + n * W);
      s[n] = fma(x.low, load(a + i + n * W), s[n]);
      s[n + 1] = fma(x.high, load(a + i + (n + 1) * W), s[n + 1]);
    }
  }
  for (; i < k; i += W) s[0] = fma(k - i >= W ? load(b + i) : load_edge(b + i, k - i), load(a + i), s[0]);
  const v4 all = sums(s[0] + s[4], s[1] + s[5], s[2] + s[6], s[3] + s[7]);
  return (all[0] + all[1]) + (all[2] + all[3]);
}

#ifndef LZ_TWO_AHEAD
#define LZ_TWO_AHEAD 2048  // bytes
#endif
// One row with two rows: two streams, so that the prefetcher of the second cache, which stops at each page, has another one
// under way. For weights so wide that memory decides.
template <class T> LZ_INLINE void dot2(const float* a, const T* b0, const T* b1, int64_t k, float* out0, float* out1) {
  vf s[2][4];
  for (int n = 0; n < 4; ++n) s[0][n] = s[1][n] = splat(0.0f);
  int64_t i = 0;
  for (; i + 4 * W <= k; i += 4 * W) {
    for (int64_t at = 0; at < int64_t(4 * W * sizeof(T)); at += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(b0 + i) + LZ_TWO_AHEAD + at);
      __builtin_prefetch(reinterpret_cast<const char*>(b1 + i) + LZ_TWO_AHEAD + at);
    }
    for (int n = 0; n < 4; ++n) {
      const vf y = load(a + i + n * W);
      s[0][n] = fma(load(b0 + i + n * W), y, s[0][n]);
      s[1][n] = fma(load(b1 + i + n * W), y, s[1][n]);
    }
  }
  for (; i < k; i += W) {
    const vf y = load(a + i);
    s[0][0] = fma(k - i >= W ? load(b0 + i) : load_edge(b0 + i, k - i), y, s[0][0]);
    s[1][0] = fma(k - i >= W ? load(b1 + i) : load_edge(b1 + i, k - i), y, s[1][0]);
  }
  for (int n = 0; n < 2; ++n) {
    const v4 all = sums(s[n][0], s[n][1], s[n][2], s[n][3]);
    *(n ? out1 : out0) += (all[0] + all[1]) + (all[2] + all[3]);
  }
}

// Rows of any T as floats, zero-padded to a multiple of W, times a factor.
template <class T> inline void widen_row(const T* from, int64_t n, float* to, float factor) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const Pair x = load_pair(from + i);
    store(to + i, x.low * factor), store(to + i + W, x.high * factor);
  }
  for (; i + W <= n; i += W) store(to + i, load(from + i) * factor);
  if (i < n) store(to + i, load_edge(from + i, n - i) * factor);
}
LZ_INLINE int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

}  // namespace LZ_ISA
}  // namespace lz
