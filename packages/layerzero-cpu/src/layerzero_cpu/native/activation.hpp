// The activations of gates: SiLU, GELU (erf and tanh), ReLU. Each in two forms: to float's last places, and `brief`, good to
// about 2^-12 of the result, for results that are rounded to bfloat16's eight bits at once.
#pragma once
#include "vec.hpp"

namespace lz {
namespace LZ_ISA {
namespace {

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

// 2^r to 2^-13.7 by a cubic, for r from 0 to 1 and for r from -1/2 to 1/2.
LZ_INLINE vf cubic(vf r, float d0, float d1, float d2, float d3) {
  return fma(fma(fma(splat(d3), r, splat(d2)), r, splat(d1)), r, splat(d0));
}

// 1 / (1 + 2^t) in brief; exactly 0 where the power overflows.
LZ_INLINE vf brief_logistic(vf t) {
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
  __m512 given = bit_cast<__m512>(t);
  vf p = cubic(bit_cast<vf>(_mm512_reduce_ps(given, 1)), 0.999925219f, 0.695833541f, 0.226067155f, 0.0780245227f);
  vf down = 1.0f + bit_cast<vf>(_mm512_scalef_ps(bit_cast<__m512>(p), given));  // 1: what is above the whole number below
  return bit_cast<vf>(_mm512_rcp14_ps(bit_cast<__m512>(down)));
#else
  t = vmin(vmax(t, splat(-126.0f)), splat(128.0f));
  vf n = t + 12582912.0f;  // its last bits are the nearest whole number
  vi power = (bit_cast<vi>(n) - (0x4b400000 - 127)) << 23;
  vf p = cubic(t - (n - 12582912.0f), 0.999928074f, 0.693260985f, 0.242611122f, 0.0551716691f);
  vf down = fma(p, bit_cast<vf>(power), splat(1.0f));
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
  float32x4_t d = bit_cast<float32x4_t>(down), r = vrecpeq_f32(d);
  return bit_cast<vf>(vmulq_f32(r, vrecpsq_f32(d, r)));
#else
  return 1.0f / down;
#endif
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

template <int K> LZ_INLINE vf brief_value(vf g) {
  if (K == SILU) return g * brief_logistic(g * -1.44269504f);
  // The logit of the normal distribution is nearly g·P(g²) up to 4.5. Beyond, on the negative side, a polynomial of the
  // distance is added, down to where the result leaves float's range; on the positive side the result is g.
  if (K == GELU) {
    vf s = vmin(g * g, splat(20.25f));
    vf q = splat(5.62306025e-08f);
    q = fma(q, s, splat(-3.52595730e-06f));
    q = fma(q, s, splat(6.78439848e-05f));
    q = fma(q, s, splat(0.000611988052f));
    q = fma(q, s, splat(-0.106107709f));
    q = fma(q, s, splat(-2.30126956f));
    vf d = vmin(vmax(-4.5f - g, splat(0.0f)), splat(9.0f));
    vf e = splat(6.40545497e-06f);
    e = fma(e, d, splat(-0.000198797565f));
    e = fma(e, d, splat(0.00279961867f));
    e = fma(e, d, splat(0.693660111f));
    e = fma(e, d, splat(2.75030933f));
    return g * brief_logistic(fma(g, q, e * d));
  }
  if (K == GELU_TANH) return g * brief_logistic(g * fma(g * g, splat(-0.102943240f), splat(-2.30220818f)));
  return value<K>(g);
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

}  // namespace
}  // namespace LZ_ISA
}  // namespace lz
