// Two vectors at a time: 2·W numbers side by side in memory, for work that treats every number alike.
//
// bfloat16 numbers are taken as they lie, two in a 32-bit lane: `a` holds those at even places, `b` those at odd ones. A
// shift and a mask widen them, and rounding is done once for both, on the 16-bit halves. float and fp16 keep their order.
// So a pair of bfloat16 may only meet pairs of bfloat16, or float numbers put into the same order (`pair_order`).
#pragma once
#include "vec.hpp"

namespace lz {
namespace LZ_ISA {

struct pair {
  vf a, b;
};
typedef uint16_t vw __attribute__((vector_size(4 * LZ_LANES)));  // the 16-bit halves of a vector

LZ_INLINE pair operator+(pair p, pair q) { return {p.a + q.a, p.b + q.b}; }
LZ_INLINE pair operator*(pair p, pair q) { return {p.a * q.a, p.b * q.b}; }
LZ_INLINE pair operator*(pair p, vf q) { return {p.a * q, p.b * q}; }

LZ_INLINE pair widened(vu v) { return {bit_cast<vf>(v << 16), bit_cast<vf>(v & 0xffff0000u)}; }

template <class T> LZ_INLINE pair load2(const T* p) { return {load(p), load(p + W)}; }
LZ_INLINE pair load2(const bf16* p) {
  vu v;
  memcpy(&v, p, sizeof v);
  return widened(v);
}

// Both vectors rounded to nearest even, as they lie in memory. The upper half of a number goes up by one where the lower
// half is more than a half, or just that and the upper half odd. A NaN must have zeros in its lower half, or it could become a
// zero: so it is with NaNs of bfloat16 and of arithmetic; those of float tensors go through `tamed`.
LZ_INLINE vu narrowed(pair p) {
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
  uint16x8_t a = bit_cast<uint16x8_t>(p.a), b = bit_cast<uint16x8_t>(p.b);
  uint16x8_t upper = vtrn2q_u16(a, b), lower = vtrn1q_u16(a, b);
  lower = vorrq_u16(lower, vandq_u16(upper, vdupq_n_u16(1)));
  return bit_cast<vu>(vsubq_u16(upper, vcgtq_u16(lower, vdupq_n_u16(0x8000))));
#elif LZ_LANES == 16 && !defined(LZ_ISA_portable)
  __m512i a = bit_cast<__m512i>(p.a), b = bit_cast<__m512i>(p.b), one = _mm512_set1_epi16(1);
  // 0xf8: first | (second & third)
  __m512i upper = _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, _mm512_set1_epi32(int32_t(0xffff0000)), 0xf8);
  __m512i lower = _mm512_ternarylogic_epi32(_mm512_slli_epi32(b, 16), a, _mm512_set1_epi32(0xffff), 0xf8);
  lower = _mm512_ternarylogic_epi32(lower, upper, one, 0xf8);
  __mmask32 up = _mm512_cmpgt_epu16_mask(lower, _mm512_set1_epi16(int16_t(0x8000)));
  return bit_cast<vu>(_mm512_mask_add_epi16(upper, up, upper, one));
#elif LZ_LANES == 8 && !defined(LZ_ISA_portable)
  __m256i a = bit_cast<__m256i>(p.a), b = bit_cast<__m256i>(p.b);
  __m256i upper = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
  __m256i lower = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  lower = _mm256_or_si256(lower, _mm256_and_si256(upper, _mm256_set1_epi16(1)));
  __m256i up = _mm256_cmpgt_epi16(_mm256_xor_si256(lower, _mm256_set1_epi16(int16_t(0x8000))), _mm256_setzero_si256());
  return bit_cast<vu>(_mm256_sub_epi16(upper, up));
#else
  vu a = bit_cast<vu>(p.a), b = bit_cast<vu>(p.b);
  vw upper = bit_cast<vw>((a >> 16) | (b & 0xffff0000u)), lower = bit_cast<vw>((a & 0xffffu) | (b << 16));
  lower |= upper & 1;
  return bit_cast<vu>(upper - bit_cast<vw>(lower > 0x8000));
#endif
}

template <class T> LZ_INLINE void store2(T* p, pair v) {
  store(p, v.a);
  store(p + W, v.b);
}
LZ_INLINE void store2(bf16* p, pair v) {
  vu bits = narrowed(v);
  memcpy(p, &bits, sizeof bits);
}

// Stores, and gives what a load would give now.
template <class T> LZ_INLINE pair store2_rounded(T* p, pair v) { return {store_rounded(p, v.a), store_rounded(p + W, v.b)}; }
LZ_INLINE pair store2_rounded(bf16* p, pair v) {
  vu bits = narrowed(v);
  memcpy(p, &bits, sizeof bits);
  return widened(bits);
}

// A number of a float tensor or a parameter, fit for `narrowed`.
LZ_INLINE float tamed(float x) { return x == x ? x : __builtin_nanf(""); }

// Widens n numbers into the order of pairs of T; what does not fill a pair stays in its place at the end.
template <class T> struct PairOrder {
  template <class U> static LZ_INLINE void widen(const U* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
  }
};
template <> struct PairOrder<bf16> {
  template <class U> static LZ_INLINE void widen(const U* from, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
      for (int j = 0; j < W; ++j) {
        to[i + j] = tamed(to_float(from[i + 2 * j]));
        to[i + W + j] = tamed(to_float(from[i + 2 * j + 1]));
      }
    for (; i < n; ++i) to[i] = tamed(to_float(from[i]));
  }
};

// Asks for the lines of the 2·W numbers at p, to be read or to be written soon. Where work goes over a row more than once,
// memory would rest meanwhile; x86 only, other processors' own prefetchers look far enough ahead.
template <class T> LZ_INLINE void fetch2(const T* p) {
#if LZ_LANES >= 8 && !defined(LZ_ISA_portable)
  for (int at = 0; at < int(2 * W * sizeof(T)); at += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + at, 0, 3);
#else
  (void)p;
#endif
}
template <class T> LZ_INLINE void claim2(T* p) {
#if LZ_LANES == 16 && defined(__x86_64__) && !defined(LZ_ISA_portable)
  for (int at = 0; at < int(2 * W * sizeof(T)); at += 64)
    __asm__ volatile("prefetchw %0" ::"m"(*(reinterpret_cast<char*>(p) + at)));
#else
  (void)p;
#endif
}

}  // namespace LZ_ISA
}  // namespace lz
