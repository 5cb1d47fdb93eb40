// Vectors of float, as wide as the instruction set's registers, written with the compiler's vector types so that one
// source serves every instruction set. Loads and stores convert: bf16 and fp16 are computed in float and rounded to nearest
// even once, at the store. Intrinsics only where the compiler finds no good code: fp16 and bf16 conversion.
#pragma once
#include <stdint.h>
#include <string.h>

#include "lz.hpp"

#if defined(LZ_ISA_portable)
#define LZ_LANES 4
#elif defined(__AVX512F__)
#define LZ_LANES 16
#include <immintrin.h>
#elif defined(__AVX2__)
#define LZ_LANES 8
#include <immintrin.h>
#elif defined(__aarch64__)
#define LZ_LANES 4
#include <arm_neon.h>
#else
#define LZ_LANES 4
#endif

namespace lz {
namespace LZ_ISA {

constexpr int W = LZ_LANES;  // floats in a vector
typedef float vf __attribute__((vector_size(4 * LZ_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LZ_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LZ_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LZ_LANES)));
typedef int8_t vb __attribute__((vector_size(LZ_LANES)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class A, class B> LZ_INLINE A bit_cast(const B& b) {
  static_assert(sizeof(A) == sizeof(B), "same size");
  A a;
  memcpy(&a, &b, sizeof a);
  return a;
}

LZ_INLINE vf splat(float x) { return x - vf{}; }
LZ_INLINE vu splat_u(uint32_t x) { return x - vu{}; }
LZ_INLINE vi splat_i(int32_t x) { return x - vi{}; }
// Lanes of a where the mask is all ones, else of b.
LZ_INLINE vf select(vi mask, vf a, vf b) { return bit_cast<vf>((mask & bit_cast<vi>(a)) | (~mask & bit_cast<vi>(b))); }
// The larger and the smaller; where a is a NaN, b.
#if defined(LZ_ISA_portable)
LZ_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
LZ_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#elif LZ_LANES == 16
LZ_INLINE vf vmax(vf a, vf b) { return bit_cast<vf>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b))); }
LZ_INLINE vf vmin(vf a, vf b) { return bit_cast<vf>(_mm512_min_ps(bit_cast<__m512>(a), bit_cast<__m512>(b))); }
#elif LZ_LANES == 8
LZ_INLINE vf vmax(vf a, vf b) { return bit_cast<vf>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b))); }
LZ_INLINE vf vmin(vf a, vf b) { return bit_cast<vf>(_mm256_min_ps(bit_cast<__m256>(a), bit_cast<__m256>(b))); }
#elif defined(__aarch64__)
LZ_INLINE vf vmax(vf a, vf b) { return bit_cast<vf>(vmaxnmq_f32(bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b))); }
LZ_INLINE vf vmin(vf a, vf b) { return bit_cast<vf>(vminnmq_f32(bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b))); }
#else
LZ_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
LZ_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#endif
LZ_INLINE vf vabs(vf a) { return bit_cast<vf>(bit_cast<vu>(a) & 0x7fffffffu); }

// --- scalars ------------------------------------------------------------------------------------------------------------
LZ_INLINE float to_float(float x) { return x; }
LZ_INLINE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
LZ_INLINE float to_float(f16 x) {
#if defined(__F16C__) && !defined(LZ_ISA_portable)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 h;
  memcpy(&h, &x.bits, 2);
  return h;
#else
  uint32_t h = x.bits, sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  float magnitude = bit_cast<float>((rest << 13) + 0x38000000u);
  if (rest < 0x400u) magnitude = float(rest) * 5.9604644775390625e-08f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(magnitude));
#endif
}
template <class T> struct From;
template <> struct From<float> { static LZ_INLINE float of(float x) { return x; } };
template <> struct From<bf16> {
  static LZ_INLINE bf16 of(float x) {
    uint32_t u = bit_cast<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40u)};
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
};
template <> struct From<f16> {
  static LZ_INLINE f16 of(float x) {
#if defined(__F16C__) && !defined(LZ_ISA_portable)
    return {uint16_t(_cvtss_sh(x, 0))};
#elif defined(__aarch64__)
    __fp16 h = __fp16(x);
    return {bit_cast<uint16_t>(h)};
#else
    uint32_t u = bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return {uint16_t(sign | 0x7e00u | ((u >> 13) & 0x3ffu))};
    if (u >= 0x47800000u) return {uint16_t(sign | 0x7c00u)};
    if (u < 0x38800000u) {  // below the smallest normal: let the adder round at the place of the last bit
      float shifted = bit_cast<float>(u) + 0.5f;
      return {uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    uint32_t rounded = u + 0xfffu + ((u >> 13) & 1u);
    return {uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
#endif
  }
};

// --- loads --------------------------------------------------------------------------------------------------------------
LZ_INLINE vf widen(vh h, bf16) {
#if defined(LZ_ISA_portable)
  return bit_cast<vf>(__builtin_convertvector(h, vu) << 16);
#elif LZ_LANES == 16
  return bit_cast<vf>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(h)), 16));
#elif LZ_LANES == 8
  return bit_cast<vf>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bit_cast<__m128i>(h)), 16));
#elif defined(__aarch64__)
  return bit_cast<vf>(vshll_n_u16(bit_cast<uint16x4_t>(h), 16));
#else
  return bit_cast<vf>(__builtin_convertvector(h, vu) << 16);
#endif
}
LZ_INLINE vf widen(vh h, f16) {
#if defined(LZ_ISA_portable)
  vf r;
  for (int i = 0; i < W; ++i) r[i] = to_float(f16{h[i]});
  return r;
#elif LZ_LANES == 16
  return bit_cast<vf>(_mm512_cvtph_ps(bit_cast<__m256i>(h)));
#elif LZ_LANES == 8
  return bit_cast<vf>(_mm256_cvtph_ps(bit_cast<__m128i>(h)));
#elif defined(__aarch64__)
  return bit_cast<vf>(vcvt_f32_f16(bit_cast<float16x4_t>(h)));
#else
  vf r;
  for (int i = 0; i < W; ++i) r[i] = to_float(f16{h[i]});
  return r;
#endif
}
LZ_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T> LZ_INLINE vf load(const T* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return widen(h, T{});
}
// The first n < W elements; the other lanes hold `fill`.
template <class T> LZ_INLINE vf load_part(const T* p, int64_t n, float fill = 0.0f) {
  alignas(64) T buffer[W];
  for (int i = 0; i < W; ++i) buffer[i] = From<T>::of(fill);
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}

// --- stores -------------------------------------------------------------------------------------------------------------
LZ_INLINE vh narrow(vf v, bf16) {
  // By integers: the processor's own conversion (vcvtneps2bf16) flushes denormals, which torch keeps. Adds half of the last
  // place, and one more for an odd one, then keeps the upper halves. Nothing is added to a NaN: what is stored comes from
  // arithmetic, whose NaNs are quiet, and those survive being cut.
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
  uint32x4_t bits = bit_cast<uint32x4_t>(v), bias = vsraq_n_u32(vdupq_n_u32(0x7fff), vshlq_n_u32(bits, 15), 31);
  bias = vandq_u32(bias, vceqq_f32(bit_cast<float32x4_t>(v), bit_cast<float32x4_t>(v)));
  return bit_cast<vh>(vaddhn_u32(bits, bias));
#elif LZ_LANES == 16 && !defined(LZ_ISA_portable)
  __m512i bits = bit_cast<__m512i>(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __mmask16 number = _mm512_cmp_ps_mask(bit_cast<__m512>(v), bit_cast<__m512>(v), _CMP_ORD_Q);
  bits = _mm512_mask_add_epi32(bits, number, bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return bit_cast<vh>(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
#elif LZ_LANES == 8 && !defined(LZ_ISA_portable)
  __m256i bits = bit_cast<__m256i>(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i number = bit_cast<__m256i>(_mm256_cmp_ps(bit_cast<__m256>(v), bit_cast<__m256>(v), _CMP_ORD_Q));
  __m256i bias = _mm256_and_si256(number, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  bits = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0xd8);
  return bit_cast<vh>(_mm256_castsi256_si128(bits));
#else
  vu u = bit_cast<vu>(v);
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu quiet = (u >> 16) | 0x40u;
  vi nan = (v != v);
  return __builtin_convertvector((bit_cast<vu>(nan) & quiet) | (~bit_cast<vu>(nan) & rounded), vh);
#endif
}
LZ_INLINE vh narrow(vf v, f16) {
#if defined(LZ_ISA_portable)
  vh r;
  for (int i = 0; i < W; ++i) r[i] = From<f16>::of(v[i]).bits;
  return r;
#elif LZ_LANES == 16
  return bit_cast<vh>(_mm512_cvtps_ph(bit_cast<__m512>(v), 0));
#elif LZ_LANES == 8
  return bit_cast<vh>(_mm256_cvtps_ph(bit_cast<__m256>(v), 0));
#elif defined(__aarch64__)
  return bit_cast<vh>(vcvt_f16_f32(bit_cast<float32x4_t>(v)));
#else
  vh r;
  for (int i = 0; i < W; ++i) r[i] = From<f16>::of(v[i]).bits;
  return r;
#endif
}
LZ_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
template <class T> LZ_INLINE void store(T* p, vf v) {
  vh h = narrow(v, T{});
  memcpy(p, &h, sizeof h);
}
template <class T> LZ_INLINE void store_part(T* p, vf v, int64_t n) {
  alignas(64) T buffer[W];
  store(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// --- arithmetic ---------------------------------------------------------------------------------------------------------
LZ_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }  // contracted: -ffp-contract=fast

// Sum of the lanes, always in the same order.
LZ_INLINE float sum(vf v) {
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
  return vaddvq_f32(bit_cast<float32x4_t>(v));
#elif LZ_LANES == 16 && !defined(LZ_ISA_portable)
  return _mm512_reduce_add_ps(bit_cast<__m512>(v));  // by halves, like the loop below
#else
  float lane[W];
  memcpy(lane, &v, sizeof v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
#endif
}
LZ_INLINE float max_of(vf v) {
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
  return vmaxvq_f32(bit_cast<float32x4_t>(v));
#elif LZ_LANES == 16 && !defined(LZ_ISA_portable)
  return _mm512_reduce_max_ps(bit_cast<__m512>(v));
#else
  float lane[W];
  memcpy(lane, &v, sizeof v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
#endif
}

// Stores, and gives what a load would give now.
LZ_INLINE vf store_rounded(float* p, vf v) {
  store(p, v);
  return v;
}
template <class T> LZ_INLINE vf store_rounded(T* p, vf v) {
  vh h = narrow(v, T{});
  memcpy(p, &h, sizeof h);
  return widen(h, T{});
}

// e^x for -87 < x < 88 and nothing else.
LZ_INLINE vf exp_normal(vf x) {
  vf n = x * 1.44269504088896341f + 12582912.0f;
  vi k = bit_cast<vi>(n) - 0x4b400000;
  n = n - 12582912.0f;
  vf r = fma(n, splat(-0.693145751953125f), x);
  r = fma(n, splat(-1.42860682030941723e-6f), r);
  vf p = splat(1.0f / 5040.0f);
  p = fma(p, r, splat(1.0f / 720.0f));
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r) + 1.0f;
  return p * bit_cast<vf>((k + 127) << 23);
}

// e^x to 1 ulp or so over the whole range: 0 below -104, inf above 88.73, NaN for NaN; results below the smallest normal
// come out right, since the scaling is done in two steps.
LZ_INLINE vf vexp(vf x) {
  vf clamped = vmin(vmax(x, splat(-104.0f)), splat(88.8f));  // a NaN becomes -104 here and is put back at the end
  vf n = clamped * 1.44269504088896341f + 12582912.0f;       // the sum's last bits are the nearest whole number
  vi k = bit_cast<vi>(n) - 0x4b400000;
  n = n - 12582912.0f;
  vf r = fma(n, splat(-0.693145751953125f), clamped);
  r = fma(n, splat(-1.42860682030941723e-6f), r);
  vf p = splat(1.0f / 5040.0f);
  p = fma(p, r, splat(1.0f / 720.0f));
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r) + 1.0f;
  vi half = k >> 1;
  vf e = p * bit_cast<vf>((half + 127) << 23) * bit_cast<vf>((k - half + 127) << 23);
  return select(x != x, x, e);
}

// The error function to 1e-7, from a polynomial for -log(1 - erf).
LZ_INLINE vf verf(vf x) {
  vf t = vmin(vabs(x), splat(4.0f));  // beyond 4 it is 1 in float
  vf q = splat(3.074282722081989e-05f);
  q = fma(q, t, splat(-0.00030286499531939626f));
  q = fma(q, t, splat(0.0010122545063495636f));
  q = fma(q, t, splat(0.0005719682667404413f));
  q = fma(q, t, splat(-0.01961737871170044f));
  q = fma(q, t, splat(0.10293696820735931f));
  q = fma(q, t, splat(0.6365931630134583f));
  q = fma(q, t, splat(1.1283807754516602f)) * t;
  vf e = 1.0f - exp_normal(-q);
  e = bit_cast<vf>(bit_cast<vu>(e) | (bit_cast<vu>(x) & 0x80000000u));
  return select(x != x, x, e);
}

}  // namespace LZ_ISA
}  // namespace lz

// Runs `call` with `T` standing for the element type of a floating dtype; falls through for any other.
#define LZ_FLOATS(dtype, ...)                              \
  do {                                                     \
    if ((dtype) == F32) { typedef float T; __VA_ARGS__; }  \
    if ((dtype) == BF16) { typedef bf16 T; __VA_ARGS__; }  \
    if ((dtype) == F16) { typedef f16 T; __VA_ARGS__; }    \
  } while (0)
#define LZ_WEIGHTS(dtype, ...)                             \
  do {                                                     \
    if ((dtype) == F32) { typedef float U; __VA_ARGS__; }  \
    if ((dtype) == BF16) { typedef bf16 U; __VA_ARGS__; }  \
    if ((dtype) == F16) { typedef f16 U; __VA_ARGS__; }    \
  } while (0)
