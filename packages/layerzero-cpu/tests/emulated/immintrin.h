// Stands in for the compiler's own header, for tests only: the AVX-512, VNNI, BF16 and AMX operations that the kernels use,
// written out in portable C++ after their published definitions. No machine of the test lanes has tiles; with this header
// first on the path the very same kernel sources run anywhere, under the sanitizers too.
//
// Tiles are stricter here than the processor: a tile that was not configured, shapes that do not fit each other, and a store
// across cache lines, which the processor forgives at many times the cost, end the program with a line that says which.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(LZ_SANITIZED)
// Inlined, every check would be there again for every lane; and behaviour is checked in the kernels, not in here: with it,
// the compiler would be busy for a quarter of an hour.
#define LZ_EMU static inline __attribute__((unused, no_sanitize("undefined")))
#else
// Left to the compiler: put in everywhere, these bodies are most of what it would be busy with.
#define LZ_EMU static inline __attribute__((unused))
#endif

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef float __m256 __attribute__((vector_size(32), may_alias));
typedef float __m128 __attribute__((vector_size(16), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef uint16_t __m512bh __attribute__((vector_size(64), may_alias));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

// A register as an array of T.
template <class T, class V> struct LzLanes {
  static constexpr int N = int(sizeof(V) / sizeof(T));
  T at[N];
  LzLanes() = default;
  explicit LzLanes(const V& v) { memcpy(at, &v, sizeof v); }
  V get() const {
    V v;
    memcpy(&v, at, sizeof v);
    return v;
  }
};
template <class T, class V> LZ_EMU LzLanes<T, V> lz_lanes(const V& v) { return LzLanes<T, V>(v); }
template <class T, class V, class F> LZ_EMU V lz_make(const F& f) {
  LzLanes<T, V> r;
  for (int i = 0; i < r.N; ++i) r.at[i] = T(f(i));
  return r.get();
}
LZ_EMU float lz_as_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
LZ_EMU uint32_t lz_as_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
LZ_EMU float lz_flushed(float f) { return (lz_as_bits(f) & 0x7f800000u) ? f : lz_as_float(lz_as_bits(f) & 0x80000000u); }

// --- moving ---------------------------------------------------------------------------------------------------------------
#define LZ_EMU_MOVES(P, SI, TYPE)                                                                       \
  LZ_EMU TYPE P##setzero_##SI() { return TYPE{}; }                                                      \
  LZ_EMU TYPE P##loadu_##SI(const void* p) {                                                            \
    TYPE v;                                                                                             \
    memcpy(&v, p, sizeof v);                                                                            \
    return v;                                                                                           \
  }                                                                                                     \
  LZ_EMU void P##storeu_##SI(void* p, TYPE v) { memcpy(p, &v, sizeof v); }                              \
  LZ_EMU TYPE P##and_##SI(TYPE a, TYPE b) { return a & b; }                                             \
  LZ_EMU TYPE P##or_##SI(TYPE a, TYPE b) { return a | b; }                                              \
  LZ_EMU TYPE P##xor_##SI(TYPE a, TYPE b) { return a ^ b; }                                             \
  LZ_EMU TYPE P##set1_epi8(char x) {                                                                    \
    return lz_make<int8_t, TYPE>([&](int) { return x; });                                               \
  }                                                                                                     \
  LZ_EMU TYPE P##set1_epi32(int x) {                                                                    \
    return lz_make<int32_t, TYPE>([&](int) { return x; });                                              \
  }                                                                                                     \
  LZ_EMU TYPE P##srli_epi16(TYPE a, int n) {                                                            \
    const auto x = lz_lanes<uint16_t>(a);                                                               \
    return lz_make<uint16_t, TYPE>([&](int i) { return x.at[i] >> n; });                                \
  }                                                                                                     \
  LZ_EMU TYPE P##srli_epi32(TYPE a, int n) {                                                            \
    const auto x = lz_lanes<uint32_t>(a);                                                               \
    return lz_make<uint32_t, TYPE>([&](int i) { return x.at[i] >> n; });                                \
  }                                                                                                     \
  LZ_EMU TYPE P##slli_epi32(TYPE a, int n) {                                                            \
    const auto x = lz_lanes<uint32_t>(a);                                                               \
    return lz_make<uint32_t, TYPE>([&](int i) { return x.at[i] << n; });                                \
  }                                                                                                     \
  LZ_EMU TYPE P##add_epi32(TYPE a, TYPE b) {                                                            \
    const auto x = lz_lanes<uint32_t>(a), y = lz_lanes<uint32_t>(b);                                    \
    return lz_make<uint32_t, TYPE>([&](int i) { return x.at[i] + y.at[i]; });                           \
  }                                                                                                     \
  LZ_EMU TYPE P##ternarylogic_epi32(TYPE a, TYPE b, TYPE c, int table) {                                \
    const auto x = lz_lanes<uint32_t>(a), y = lz_lanes<uint32_t>(b), z = lz_lanes<uint32_t>(c);         \
    return lz_make<uint32_t, TYPE>([&](int i) {                                                         \
      uint32_t r = 0;                                                                                   \
      for (int e = 0; e < 8; ++e)                                                                       \
        if (table >> e & 1)                                                                             \
          r |= (e & 4 ? x.at[i] : ~x.at[i]) & (e & 2 ? y.at[i] : ~y.at[i]) & (e & 1 ? z.at[i] : ~z.at[i]); \
      return r;                                                                                         \
    });                                                                                                 \
  }                                                                                                     \
  LZ_EMU TYPE P##dpbusd_epi32(TYPE s, TYPE a, TYPE b) {                                                 \
    auto t = lz_lanes<int32_t>(s);                                                                      \
    const auto x = lz_lanes<uint8_t>(a);                                                                \
    const auto y = lz_lanes<int8_t>(b);                                                                 \
    for (int i = 0; i < x.N; ++i) t.at[i / 4] = int32_t(uint32_t(t.at[i / 4]) + uint32_t(x.at[i] * y.at[i])); \
    return t.get();                                                                                     \
  }
LZ_EMU_MOVES(_mm512_, si512, __m512i)
LZ_EMU_MOVES(_mm256_, si256, __m256i)
LZ_EMU_MOVES(_mm_, si128, __m128i)
#undef LZ_EMU_MOVES

LZ_EMU __m512 _mm512_loadu_ps(const void* p) {
  __m512 v;
  memcpy(&v, p, 64);
  return v;
}
LZ_EMU __m512i _mm512_maskz_loadu_epi32(__mmask16 m, const void* p) {
  return lz_make<uint32_t, __m512i>([&](int i) {
    uint32_t x = 0;
    if (m >> i & 1) memcpy(&x, static_cast<const char*>(p) + i * 4, 4);
    return x;
  });
}
LZ_EMU __m512 _mm512_maskz_loadu_ps(__mmask16 m, const void* p) { return (__m512)_mm512_maskz_loadu_epi32(m, p); }
LZ_EMU __m256i _mm256_maskz_loadu_epi16(__mmask16 m, const void* p) {
  return lz_make<uint16_t, __m256i>([&](int i) {
    uint16_t x = 0;
    if (m >> i & 1) memcpy(&x, static_cast<const char*>(p) + i * 2, 2);
    return x;
  });
}

// --- arranging ------------------------------------------------------------------------------------------------------------
// Pairs of T inside each quarter of 16 bytes, from the low or the high half of it.
template <class T> LZ_EMU __m512i lz_unpack(__m512i a, __m512i b, bool high) {
  constexpr int Q = int(16 / sizeof(T));
  const auto x = lz_lanes<T>(a), y = lz_lanes<T>(b);
  return lz_make<T, __m512i>([&](int i) {
    const int from = i / Q * Q + i % Q / 2 + (high ? Q / 2 : 0);
    return i % 2 ? y.at[from] : x.at[from];
  });
}
LZ_EMU __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return lz_unpack<uint32_t>(a, b, false); }
LZ_EMU __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return lz_unpack<uint32_t>(a, b, true); }
LZ_EMU __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return lz_unpack<uint64_t>(a, b, false); }
LZ_EMU __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return lz_unpack<uint64_t>(a, b, true); }
LZ_EMU __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
  const auto x = lz_lanes<uint32_t>(a), y = lz_lanes<uint32_t>(b);
  return lz_make<uint32_t, __m512i>([&](int i) {
    const int quarter = i / 4, from = (which >> (2 * quarter) & 3) * 4 + i % 4;
    return quarter < 2 ? x.at[from] : y.at[from];
  });
}
LZ_EMU __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
  const auto n = lz_lanes<uint16_t>(index), x = lz_lanes<uint16_t>(a);
  return lz_make<uint16_t, __m512i>([&](int i) { return x.at[n.at[i] & 31]; });
}
LZ_EMU __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) {
  const auto n = lz_lanes<uint32_t>(index);
  const auto x = lz_lanes<float>(a);
  return lz_make<float, __m512>([&](int i) { return x.at[n.at[i] & 15]; });
}
LZ_EMU __m256 _mm512_castps512_ps256(__m512 a) {
  __m256 r;
  memcpy(&r, &a, 32);
  return r;
}
LZ_EMU __m256 _mm512_extractf32x8_ps(__m512 a, int which) {
  __m256 r;
  memcpy(&r, reinterpret_cast<const char*>(&a) + which * 32, 32);
  return r;
}
LZ_EMU __m128 _mm256_castps256_ps128(__m256 a) {
  __m128 r;
  memcpy(&r, &a, 16);
  return r;
}
LZ_EMU __m128 _mm256_extractf128_ps(__m256 a, int which) {
  __m128 r;
  memcpy(&r, reinterpret_cast<const char*>(&a) + which * 16, 16);
  return r;
}

// --- numbers --------------------------------------------------------------------------------------------------------------
#define _CMP_ORD_Q 7
LZ_EMU __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  if (how != _CMP_ORD_Q) abort();
  __mmask16 m = 0;
  for (int i = 0; i < 16; ++i) m = __mmask16(m | (a[i] == a[i] && b[i] == b[i] ? 1u << i : 0u));
  return m;
}
LZ_EMU __m512i _mm512_mask_add_epi32(__m512i keep, __mmask16 m, __m512i a, __m512i b) {
  const auto k = lz_lanes<uint32_t>(keep), x = lz_lanes<uint32_t>(a), y = lz_lanes<uint32_t>(b);
  return lz_make<uint32_t, __m512i>([&](int i) { return m >> i & 1 ? x.at[i] + y.at[i] : k.at[i]; });
}
LZ_EMU __m512 _mm512_max_ps(__m512 a, __m512 b) {  // the second where either is a NaN, as the instruction has it
  return lz_make<float, __m512>([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
LZ_EMU __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return lz_make<float, __m512>([&](int i) { return a[i] < b[i] ? a[i] : b[i]; });
}
LZ_EMU __m256 _mm256_add_ps(__m256 a, __m256 b) { return a + b; }
LZ_EMU __m128 _mm_add_ps(__m128 a, __m128 b) { return a + b; }
LZ_EMU __m256 _mm256_hadd_ps(__m256 a, __m256 b) {
  return __m256{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3], a[4] + a[5], a[6] + a[7], b[4] + b[5], b[6] + b[7]};
}
LZ_EMU float _mm512_reduce_add_ps(__m512 a) {
  float t[16];
  memcpy(t, &a, 64);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) t[i] += t[i + half];
  return t[0];
}
LZ_EMU float _mm512_reduce_max_ps(__m512 a) {
  float t[16];
  memcpy(t, &a, 64);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
}

// --- conversions ----------------------------------------------------------------------------------------------------------
LZ_EMU __m512i _mm512_cvtepu16_epi32(__m256i a) {
  const auto x = lz_lanes<uint16_t>(a);
  return lz_make<uint32_t, __m512i>([&](int i) { return x.at[i]; });
}
LZ_EMU __m512i _mm512_cvtepu8_epi32(__m128i a) {
  const auto x = lz_lanes<uint8_t>(a);
  return lz_make<uint32_t, __m512i>([&](int i) { return x.at[i]; });
}
LZ_EMU __m512i _mm512_cvtepi8_epi32(__m128i a) {
  const auto x = lz_lanes<int8_t>(a);
  return lz_make<int32_t, __m512i>([&](int i) { return x.at[i]; });
}
LZ_EMU __m512 _mm512_cvtepi32_ps(__m512i a) {
  const auto x = lz_lanes<int32_t>(a);
  return lz_make<float, __m512>([&](int i) { return float(x.at[i]); });
}
LZ_EMU __m256i _mm512_cvtepi32_epi16(__m512i a) {
  const auto x = lz_lanes<uint32_t>(a);
  return lz_make<uint16_t, __m256i>([&](int i) { return x.at[i]; });
}
LZ_EMU uint16_t lz_to_bf16(float f) {  // as vcvtneps2bf16: to nearest even, denormals become zero, a NaN is made quiet
  uint32_t u = lz_as_bits(lz_flushed(f));
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
LZ_EMU __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  return lz_make<uint16_t, __m512bh>([&](int i) { return lz_to_bf16(i < 16 ? low[i] : high[i - 16]); });
}
LZ_EMU float lz_from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return lz_as_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  const float magnitude = rest < 0x400u ? float(rest) * 5.9604644775390625e-08f : lz_as_float((rest << 13) + 0x38000000u);
  return lz_as_float(sign | lz_as_bits(magnitude));
}
LZ_EMU uint16_t lz_to_half(float f) {
  uint32_t u = lz_as_bits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (u >= 0x47800000u) return uint16_t(sign | 0x7c00u);
  if (u < 0x38800000u) return uint16_t(sign | (lz_as_bits(lz_as_float(u) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13));
}
LZ_EMU __m512 _mm512_cvtph_ps(__m256i a) {
  const auto x = lz_lanes<uint16_t>(a);
  return lz_make<float, __m512>([&](int i) { return lz_from_half(x.at[i]); });
}
LZ_EMU __m256i _mm512_cvtps_ph(__m512 a, int) {
  return lz_make<uint16_t, __m256i>([&](int i) { return lz_to_half(a[i]); });
}

// --- tiles ----------------------------------------------------------------------------------------------------------------
struct LzTile {
  int rows, bytes;  // 0 rows: not configured
  alignas(64) uint8_t at[16][64];
};
inline __thread LzTile lz_tiles[8];
inline __thread bool lz_tiles_set;

[[noreturn]] __attribute__((unused)) static void lz_tile_error(const char* what, int tile) {
  fprintf(stderr, "emulated tiles: %s (tile %d)\n", what, tile);
  abort();
}
LZ_EMU LzTile& lz_tile(int t) {
  if (t < 0 || t > 7) lz_tile_error("there are eight", t);
  if (!lz_tiles_set || lz_tiles[t].rows == 0) lz_tile_error("used without being configured", t);
  return lz_tiles[t];
}
LZ_EMU void _tile_loadconfig(const void* config) {
  const uint8_t* c = static_cast<const uint8_t*>(config);
  if (c[0] != 1 || c[1] != 0) lz_tile_error("palette 1 from row 0 is the one there is", -1);
  for (int i = 2; i < 16; ++i)
    if (c[i]) lz_tile_error("a reserved byte of the configuration is not zero", -1);
  for (int i = 32; i < 48; ++i)
    if (c[i]) lz_tile_error("bytes for a ninth tile", -1);
  for (int i = 56; i < 64; ++i)
    if (c[i]) lz_tile_error("rows for a ninth tile", -1);
  for (int t = 0; t < 8; ++t) {
    const int bytes = c[16 + 2 * t] | c[17 + 2 * t] << 8, rows = c[48 + t];
    if (bytes > 64 || bytes % 4 || rows > 16 || !bytes != !rows) lz_tile_error("configured larger than a tile is", t);
    lz_tiles[t].rows = rows, lz_tiles[t].bytes = bytes;
    memset(lz_tiles[t].at, 0, sizeof lz_tiles[t].at);
  }
  lz_tiles_set = true;
}
LZ_EMU void _tile_release() { lz_tiles_set = false; }
LZ_EMU void _tile_zero(int t) { memset(lz_tile(t).at, 0, sizeof lz_tiles[t].at); }
LZ_EMU void lz_tile_loadd(int t, const void* p, int64_t stride) {
  LzTile& to = lz_tile(t);
  for (int r = 0; r < to.rows; ++r) {
    memcpy(to.at[r], static_cast<const char*>(p) + r * stride, size_t(to.bytes));
    memset(to.at[r] + to.bytes, 0, size_t(64 - to.bytes));
  }
}
LZ_EMU void lz_tile_stored(int t, void* p, int64_t stride) {
  const LzTile& from = lz_tile(t);
  if (reinterpret_cast<uintptr_t>(p) % 64 || stride % 64) lz_tile_error("stored across cache lines", t);
  for (int r = 0; r < from.rows; ++r) memcpy(static_cast<char*>(p) + r * stride, from.at[r], size_t(from.bytes));
}
// The intrinsics are macros of the compiler's header too, so that an int may be a pointer's distance.
#define _tile_loadd(t, p, stride) lz_tile_loadd(t, p, int64_t(stride))
#define _tile_stored(t, p, stride) lz_tile_stored(t, p, int64_t(stride))

// c += a times b: pairs of bf16, summed in float in the order of the pairs; denormals count as zero, before and after.
__attribute__((unused)) static void _tile_dpbf16ps(int c, int a, int b) {
  LzTile &to = lz_tile(c), &x = lz_tile(a), &y = lz_tile(b);
  if (c == a || c == b || a == b) lz_tile_error("a product wants three tiles", c);
  if (to.rows != x.rows || to.bytes != y.bytes || x.bytes != y.rows * 4) lz_tile_error("shapes of a product do not fit", c);
  const int pairs = x.bytes / 4, columns = to.bytes / 4;
  float even[16][16], odd[16][16];
  for (int p = 0; p < pairs; ++p)
    for (int j = 0; j < columns; ++j) {
      uint32_t word;
      memcpy(&word, y.at[p] + j * 4, 4);
      even[p][j] = lz_flushed(lz_as_float(word << 16)), odd[p][j] = lz_flushed(lz_as_float(word & 0xffff0000u));
    }
  for (int i = 0; i < to.rows; ++i) {
    float sum[16];
    memcpy(sum, to.at[i], 64);
    for (int p = 0; p < pairs; ++p) {
      uint32_t word;
      memcpy(&word, x.at[i] + p * 4, 4);
      const float first = lz_flushed(lz_as_float(word << 16)), second = lz_flushed(lz_as_float(word & 0xffff0000u));
      for (int j = 0; j < columns; ++j) sum[j] = (sum[j] + first * even[p][j]) + second * odd[p][j];
    }
    for (int j = 0; j < columns; ++j) sum[j] = lz_flushed(sum[j]);
    memcpy(to.at[i], sum, 64);
  }
}
