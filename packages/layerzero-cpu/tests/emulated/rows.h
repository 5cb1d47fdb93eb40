// More AVX-512 operations written out in C++, for tests only: those of the kernels that go over rows (norms, activations,
// RoPE, sampling, codes). Comes after immintrin.h beside it.
#pragma once
#include <math.h>

#include "immintrin.h"

typedef double __m512d __attribute__((vector_size(64), may_alias));

LZ_EMU __m512i _mm512_set1_epi16(short x) {
  return lz_make<int16_t, __m512i>([&](int) { return x; });
}
LZ_EMU __m512 _mm512_set1_ps(float x) {
  return lz_make<float, __m512>([&](int) { return x; });
}
LZ_EMU __m512d _mm512_set1_pd(double x) {
  return lz_make<double, __m512d>([&](int) { return x; });
}
LZ_EMU __m512d _mm512_load_pd(const double* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64) abort();  // the instruction faults
  __m512d v;
  memcpy(&v, p, 64);
  return v;
}

// --- comparing ------------------------------------------------------------------------------------------------------------
#define _CMP_UNORD_Q 3
#define _CMP_NEQ_UQ 4
#define _CMP_GE_OQ 29
LZ_EMU __mmask16 lz_compared(__m512 a, __m512 b, int how) {
  __mmask16 m = 0;
  for (int i = 0; i < 16; ++i) {
    bool nan = a[i] != a[i] || b[i] != b[i], yes = false;
    switch (how) {
      case _CMP_ORD_Q: yes = !nan; break;
      case _CMP_UNORD_Q: yes = nan; break;
      case _CMP_NEQ_UQ: yes = nan || a[i] != b[i]; break;
      case _CMP_GE_OQ: yes = !nan && a[i] >= b[i]; break;
      default: abort();
    }
    m = __mmask16(m | (yes ? 1u << i : 0u));
  }
  return m;
}
#define _mm512_cmp_ps_mask lz_compared
LZ_EMU __mmask32 _mm512_cmpgt_epu16_mask(__m512i a, __m512i b) {
  const auto x = lz_lanes<uint16_t>(a), y = lz_lanes<uint16_t>(b);
  __mmask32 m = 0;
  for (int i = 0; i < 32; ++i) m |= x.at[i] > y.at[i] ? 1u << i : 0u;
  return m;
}

// --- arithmetic -----------------------------------------------------------------------------------------------------------
LZ_EMU __m512i _mm512_mask_add_epi16(__m512i otherwise, __mmask32 m, __m512i a, __m512i b) {
  const auto x = lz_lanes<uint16_t>(a), y = lz_lanes<uint16_t>(b), o = lz_lanes<uint16_t>(otherwise);
  return lz_make<uint16_t, __m512i>([&](int i) { return m >> i & 1 ? uint16_t(x.at[i] + y.at[i]) : o.at[i]; });
}
LZ_EMU __m512d _mm512_max_pd(__m512d a, __m512d b) {  // the second where either is a NaN
  return lz_make<double, __m512d>([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
LZ_EMU __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return lz_make<float, __m512>([&](int i) { return fmaf(-a[i], b[i], c[i]); });
}
LZ_EMU __m512 _mm512_mask_fmadd_ps(__m512 a, __mmask16 m, __m512 b, __m512 c) {
  return lz_make<float, __m512>([&](int i) { return m >> i & 1 ? fmaf(a[i], b[i], c[i]) : a[i]; });
}
// As wrong as it may be: within 2^-14 of the inverse, always below.
LZ_EMU __m512 _mm512_rcp14_ps(__m512 a) {
  return lz_make<float, __m512>([&](int i) { return lz_as_float(lz_as_bits(1.0f / a[i]) & 0xfffffe00u); });
}
// What is left above the whole number below; nothing of an infinity.
LZ_EMU __m512 _mm512_reduce_ps(__m512 a, int how) {
  if (how != 1) abort();
  return lz_make<float, __m512>([&](int i) { return a[i] - a[i] == 0.0f ? a[i] - floorf(a[i]) : a[i] == a[i] ? 0.0f : a[i]; });
}
// a · 2^floor(b), rounded once.
LZ_EMU double lz_scaled(double a, double b) {
  if (a != a || b != b) return a + b;
  double n = floor(b);
  return ldexp(a, n > 5000 ? 5000 : n < -5000 ? -5000 : int(n));
}
LZ_EMU __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return lz_make<float, __m512>([&](int i) { return float(lz_scaled(a[i], b[i])); });
}
LZ_EMU __m512d _mm512_scalef_pd(__m512d a, __m512d b) {
  return lz_make<double, __m512d>([&](int i) { return lz_scaled(a[i], b[i]); });
}

// --- arranging ------------------------------------------------------------------------------------------------------------
LZ_EMU __m128i _mm512_cvtepi32_epi8(__m512i a) {
  const auto x = lz_lanes<uint32_t>(a);
  return lz_make<uint8_t, __m128i>([&](int i) { return x.at[i]; });
}
LZ_EMU __m512d _mm512_permutex2var_pd(__m512d a, __m512i index, __m512d b) {
  const auto n = lz_lanes<uint64_t>(index);
  return lz_make<double, __m512d>([&](int i) { return n.at[i] & 8 ? b[n.at[i] & 7] : a[n.at[i] & 7]; });
}
