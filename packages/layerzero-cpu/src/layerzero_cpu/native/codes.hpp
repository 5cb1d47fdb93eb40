// Numbers to INT8, INT4 and FP8 codes and back, a run with one scale at a time. Numbers are divided by their scale, not
// multiplied by its inverse, and rounded to nearest even, so that the codes are the reference's.
#pragma once
#include "pair.hpp"

namespace lz {
namespace LZ_ISA {
namespace {

enum Format : int64_t { INT8, INT4, E4M3, E5M2 };

LZ_INLINE float largest_of(int64_t format) {
  return format == INT8 ? 127.0f : format == INT4 ? 7.0f : format == E4M3 ? 448.0f : 57344.0f;
}

struct Range {
  vf low = {}, high = {};  // of 0 and the numbers seen
  vi nan = {};
};

template <class T> LZ_INLINE void range_of(const T* x, int64_t n, float* low, float* high) {
  Range r, q;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    pair v = load2(x + i);
    r.low = vmin(v.a, r.low), r.high = vmax(v.a, r.high), r.nan |= (v.a != v.a);
    q.low = vmin(v.b, q.low), q.high = vmax(v.b, q.high), q.nan |= (v.b != v.b);
  }
  r.low = vmin(r.low, q.low), r.high = vmax(r.high, q.high), r.nan |= q.nan;
  for (; i + W <= n; i += W) {
    vf v = load(x + i);
    r.low = vmin(v, r.low), r.high = vmax(v, r.high), r.nan |= (v != v);
  }
  if (i < n) {
    vf v = load_part(x + i, n - i);
    r.low = vmin(v, r.low), r.high = vmax(v, r.high), r.nan |= (v != v);
  }
  float a = 0.0f, b = 0.0f;
  bool bad = false;
  for (int lane = 0; lane < W; ++lane) {
    a = r.low[lane] < a ? r.low[lane] : a, b = r.high[lane] > b ? r.high[lane] : b, bad |= r.nan[lane] != 0;
  }
  *low = bad ? __builtin_nanf("") : a;
  *high = bad ? __builtin_nanf("") : b;
}

// The same where only the larger of the two counts: numbers of 16 bits without their sign are ordered like whole numbers,
// with the NaNs above infinity.
template <class T> LZ_INLINE void peak_of(const T* x, int64_t n, float* low, float* high) {
  typedef int16_t vs __attribute__((vector_size(4 * LZ_LANES)));
  vs p = {}, q = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    vs a, b;
    memcpy(&a, x + i, sizeof a), memcpy(&b, x + i + 2 * W, sizeof b);
    a &= 0x7fff, b &= 0x7fff;
    p = a > p ? a : p, q = b > q ? b : q;
  }
  p = p > q ? p : q;
  int16_t most = 0;
  for (int lane = 0; lane < 2 * W; ++lane) most = p[lane] > most ? p[lane] : most;
  for (; i < n; ++i) {
    int16_t bits = int16_t(x[i].bits & 0x7fff);
    most = bits > most ? bits : most;
  }
  float peak = to_float(T{uint16_t(most)});
  *low = peak == peak ? -peak : peak, *high = peak;
}
LZ_INLINE void peak_of(const float* x, int64_t n, float* low, float* high) { range_of(x, n, low, high); }

// x / by, rounded once like a division: after two steps towards it the quotient is the right one (Markstein), where neither
// it nor the remainders leave the normal numbers.
#if (LZ_LANES >= 8 || defined(__aarch64__)) && !defined(LZ_ISA_portable)
constexpr bool FUSED = true;
LZ_INLINE vf less(vf x, vf q, vf by) {  // x - q·by, rounded once
#if LZ_LANES == 16
  return bit_cast<vf>(_mm512_fnmadd_ps(bit_cast<__m512>(q), bit_cast<__m512>(by), bit_cast<__m512>(x)));
#elif LZ_LANES == 8
  return bit_cast<vf>(_mm256_fnmadd_ps(bit_cast<__m256>(q), bit_cast<__m256>(by), bit_cast<__m256>(x)));
#else
  return bit_cast<vf>(vfmsq_f32(bit_cast<float32x4_t>(x), bit_cast<float32x4_t>(q), bit_cast<float32x4_t>(by)));
#endif
}
LZ_INLINE vf quotient(vf x, vf by, vf inverse) {
  vf q = x * inverse;
  q = less(q, -less(x, q, by), inverse);
  return less(q, -less(x, q, by), inverse);
}
#else
constexpr bool FUSED = false;
LZ_INLINE vf quotient(vf x, vf by, vf) { return x / by; }
#endif

// Whether `quotient` is a division for every number of a group with this scale (smaller numbers than its domain become 0).
LZ_INLINE bool ordinary(float scale) { return FUSED && scale > 5.4e-20f && scale < 1.8e19f; }

// INT8 and INT4 codes in the low bits of each lane, of numbers that lie in the range their scale was made for.
template <int F> LZ_INLINE vu whole(vf x, vf by, vf inverse, float zero, bool affine) {
  constexpr float largest = F == INT8 ? 127.0f : 7.0f;
  vf v = quotient(x, by, inverse);
  if (affine) {
    v = ((vmin(vmax(v, splat(-1024.0f)), splat(1024.0f)) + 12582912.0f) - 12582912.0f) + zero;
    v = vmin(vmax(v, splat(-largest - 1.0f)), splat(largest));
  }
  return bit_cast<vu>(v + 12582912.0f);  // the sum's last bits are the nearest whole number
}

LZ_INLINE void store_bytes(uint8_t* out, vu code) {
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(bit_cast<__m512i>(code)));
#else
  vb bytes = __builtin_convertvector(code & 0xffu, vb);
  memcpy(out, &bytes, W);
#endif
}
LZ_INLINE void store_words(uint8_t* out, vu code) {
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(bit_cast<__m512i>(code)));
#else
  vh words = __builtin_convertvector(code & 0xffffu, vh);
  memcpy(out, &words, 2 * W);
#endif
}

// A pair of bfloat16 lies even and odd, as codes do that share a byte or a word.
template <int F> LZ_INLINE void store_codes(const bf16*, uint8_t* out, int64_t i, vu a, vu b) {
  if (F == INT8) store_words(out + i, (a & 0xffu) | (b << 8));
  else store_bytes(out + i / 2, (a & 15u) | (b << 4));
}
template <int F, class T> LZ_INLINE void store_codes(const T*, uint8_t* out, int64_t i, vu a, vu b) {
  if (F == INT8) {
    store_bytes(out + i, a);
    store_bytes(out + i + W, b);
    return;
  }
  alignas(64) uint32_t lane[2 * W];
  memcpy(lane, &a, sizeof a), memcpy(lane + W, &b, sizeof b);
  for (int j = 0; j < W; ++j) out[i / 2 + j] = uint8_t((lane[2 * j] & 15) | (lane[2 * j + 1] << 4));
}

// Codes of W numbers in the low bits of each lane, whatever the numbers and the scale.
template <int F> LZ_INLINE vi encode(vf x, vf scale, float zero, bool affine) {
  vf v = x / scale;
  if (F == INT8 || F == INT4) {
    float largest = F == INT8 ? 127.0f : 7.0f;
    v = select(v != v, vf{}, v);
    if (!affine) {
      v = vmin(vmax(v, splat(-largest)), splat(largest));
      return __builtin_convertvector((v + 12582912.0f) - 12582912.0f, vi);
    }
    v = vmin(vmax(v, splat(-1024.0f)), splat(1024.0f));
    v = ((v + 12582912.0f) - 12582912.0f) + zero;
    return __builtin_convertvector(vmin(vmax(v, splat(-largest - 1.0f)), splat(largest)), vi);
  }
  // FP8: the wide number's bits, rounded at the place of the last kept bit; below the smallest normal the adder rounds.
  constexpr float top = F == E4M3 ? 448.0f : 57344.0f, least = F == E4M3 ? 0.015625f : 6.103515625e-05f;
  constexpr float magic = F == E4M3 ? 16384.0f : 128.0f;
  constexpr int cut = F == E4M3 ? 20 : 21, bias = F == E4M3 ? 120 << 3 : 112 << 2;
  vf m = vmin(vabs(v), splat(top));
  vu bits = bit_cast<vu>(m), sign = (bit_cast<vu>(v) >> 24) & 0x80u;
  vu normal = ((bits + ((1u << (cut - 1)) - 1u) + ((bits >> cut) & 1u)) >> cut) - uint32_t(bias);
  vu small = bit_cast<vu>(m + magic) - bit_cast<uint32_t>(magic);
  vu is_small = bit_cast<vu>(m < least), nan = bit_cast<vu>(v != v);
  vu code = (is_small & small) | (~is_small & normal);
  code = (nan & 0x7fu) | (~nan & code);
  return bit_cast<vi>(code | sign);
}

template <int F, class T>
LZ_INLINE void encode_run(const T* x, int64_t n, float scale, float zero, bool affine, uint8_t* out) {
  vf by = splat(scale);
  int64_t i = 0;
  if ((F == INT8 || F == INT4) && ordinary(scale)) {
    vf inverse = splat(1.0f / scale);
    for (; i + 2 * W <= n; i += 2 * W) {
      pair v = load2(x + i);
      fetch2(x + i + n);  // the next group, which will be looked through for its scale first
      store_codes<F>(x, out, i, whole<F>(v.a, by, inverse, zero, affine), whole<F>(v.b, by, inverse, zero, affine));
    }
  }
  for (; i < n; i += W) {
    int64_t m = n - i < W ? n - i : W;
    vf v = m == W ? load(x + i) : load_part(x + i, m);
    vi code = encode<F>(v, by, zero, affine);
    if (F == INT4) {
      alignas(64) int32_t lane[W];
      memcpy(lane, &code, sizeof lane);
      for (int64_t j = 0; j < m; j += 2)
        out[(i + j) / 2] = uint8_t((lane[j] & 15) | ((j + 1 < m ? lane[j + 1] & 15 : 0) << 4));
      continue;
    }
    vb narrow_ = __builtin_convertvector(code & 0xff, vb);
    if (m == W) memcpy(out + i, &narrow_, W);
    else memcpy(out + i, &narrow_, size_t(m));
  }
}

template <class T>
LZ_INLINE void encode_any(int64_t format, const T* x, int64_t n, float scale, float zero, bool affine, uint8_t* out) {
  switch (format) {
    case INT8: encode_run<INT8>(x, n, scale, zero, affine, out); break;
    case INT4: encode_run<INT4>(x, n, scale, zero, affine, out); break;
    case E4M3: encode_run<E4M3>(x, n, scale, zero, affine, out); break;
    default: encode_run<E5M2>(x, n, scale, zero, affine, out);
  }
}

// --- back ---------------------------------------------------------------------------------------------------------------
typedef uint8_t vub __attribute__((vector_size(LZ_LANES)));

// W bytes, each in a lane of its own.
LZ_INLINE vu load_bytes(const uint8_t* p) {
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
  return bit_cast<vu>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif LZ_LANES == 8 && !defined(LZ_ISA_portable)
  return bit_cast<vu>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vub b;
  memcpy(&b, p, W);
  return __builtin_convertvector(b, vu);
#endif
}

template <int F> LZ_INLINE vf decode(const uint8_t* codes, int64_t i, int64_t m) {
  alignas(64) uint8_t lane[W] = {};
  if (F == INT4) {
    for (int64_t j = 0; j < m; ++j) {
      uint8_t byte = codes[(i + j) / 2];
      lane[j] = (i + j) & 1 ? byte >> 4 : byte & 15;
    }
  } else {
    memcpy(lane, codes + i, size_t(m));
  }
  vu wide = load_bytes(lane);
  if (F == INT8) return __builtin_convertvector((bit_cast<vi>(wide) ^ 0x80) - 0x80, vf);
  if (F == INT4) return __builtin_convertvector((bit_cast<vi>(wide) ^ 8) - 8, vf);
  if (F == E5M2) return widen(__builtin_convertvector(wide << 8, vh), f16{});
  // E4M3 has fp16's layout but for the exponent's bias, 8 lower, and for its one NaN
  vf v = widen(__builtin_convertvector(((wide & 0x80u) << 8) | ((wide & 0x7fu) << 7), vh), f16{}) * 256.0f;
  vi nan = bit_cast<vi>(wide & 0x7fu) == 0x7f;
  return select(nan, splat(__builtin_nanf("")), v);
}

// INT8 and INT4 codes as pairs of bfloat16 lie; none for other numbers.
template <int F, class T> LZ_INLINE int64_t decode_pairs(const uint8_t*, int64_t, vf, vf, T*) { return 0; }
template <int F> LZ_INLINE int64_t decode_pairs(const uint8_t* codes, int64_t n, vf by, vf shift, bf16* out) {
  if (F != INT8 && F != INT4) return 0;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    vi a, b;
    if (F == INT8) {
      vh words;
      memcpy(&words, codes + i, sizeof words);
      vu wide = bit_cast<vu>(widen(words, bf16{}));  // in the upper half of each lane
      a = bit_cast<vi>(wide << 8) >> 24, b = bit_cast<vi>(wide) >> 24;
    } else {
      vu wide = load_bytes(codes + i / 2);
      a = bit_cast<vi>(wide << 28) >> 28, b = bit_cast<vi>(wide << 24) >> 28;
    }
    store2(out + i, pair{(__builtin_convertvector(a, vf) - shift) * by, (__builtin_convertvector(b, vf) - shift) * by});
  }
  return i;
}

template <int F, class T>
LZ_INLINE void decode_run(const uint8_t* codes, int64_t n, float scale, float zero, T* out) {
  vf by = splat(tamed(scale)), shift = splat(zero);
  int64_t i = decode_pairs<F>(codes, n, by, shift, out);
  for (; i + W <= n; i += W) store(out + i, (decode<F>(codes, i, W) - shift) * by);
  if (i < n) store_part(out + i, (decode<F>(codes, i, n - i) - shift) * by, n - i);
}

template <class T>
LZ_INLINE void decode_any(int64_t format, const uint8_t* codes, int64_t n, float scale, float zero, T* out) {
  switch (format) {
    case INT8: decode_run<INT8>(codes, n, scale, zero, out); break;
    case INT4: decode_run<INT4>(codes, n, scale, zero, out); break;
    case E4M3: decode_run<E4M3>(codes, n, scale, zero, out); break;
    default: decode_run<E5M2>(codes, n, scale, zero, out);
  }
}

}  // namespace
}  // namespace LZ_ISA
}  // namespace lz
