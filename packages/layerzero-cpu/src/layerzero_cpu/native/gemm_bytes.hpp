// Dot products of the bytes of codes with the digits of rows of x: four products of a digit with a code are one instruction, and
// exact; blocks are added in float.
#pragma once
#include "gemm_digits.hpp"

namespace lz {
namespace LZ_ISA {

// Vectors of V bytes: the codes of a weight, and sums of four products. `OFF` is what was added to a code to make it
// unsigned, `GAIN` what it was multiplied by to stay in its half of the byte.
template <int V> struct Bytes;
#if defined(__aarch64__)
constexpr int WIDEST = 16;
template <> struct Bytes<16> {
  typedef int8x16_t codes;
  typedef int32x4_t sums;
  typedef float lanes __attribute__((vector_size(16)));
  typedef int32_t ints __attribute__((vector_size(16)));
  static constexpr int OFF8 = 0, OFF4 = 0, GAIN4 = 16;
  static LZ_INLINE sums zero() { return vdupq_n_s32(0); }
  static LZ_INLINE sums dot(sums s, codes w, codes x) { return vdotq_s32(s, w, x); }
  static LZ_INLINE codes plain(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
  static LZ_INLINE codes whole(const void* p) { return plain(p); }
  static LZ_INLINE void halves(const void* p, codes& low, codes& high) {
    const codes b = plain(p);
    low = vshlq_n_s8(b, 4), high = vandq_s8(b, vdupq_n_s8(-16));
  }
};
#else
constexpr int WIDEST = 64;
#define LZ_BYTES(V, TYPE, P, SI)                                                                                     \
  template <> struct Bytes<V> {                                                                                      \
    typedef TYPE codes;                                                                                              \
    typedef TYPE sums;                                                                                               \
    typedef float lanes __attribute__((vector_size(V)));                                                             \
    typedef int32_t ints __attribute__((vector_size(V)));                                                            \
    static constexpr int OFF8 = 128, OFF4 = 8, GAIN4 = 1;                                                            \
    static LZ_INLINE sums zero() { return P##setzero_##SI(); }                                                       \
    static LZ_INLINE sums dot(sums s, codes w, codes x) { return P##dpbusd_epi32(s, w, x); }                         \
    static LZ_INLINE codes plain(const void* p) { return P##loadu_##SI(static_cast<const TYPE*>(p)); }               \
    static LZ_INLINE codes whole(const void* p) { return P##xor_##SI(plain(p), P##set1_epi8(char(0x80))); }          \
    static LZ_INLINE void halves(const void* p, codes& low, codes& high) {                                           \
      const codes b = plain(p), mask = P##set1_epi8(0x0f), sign = P##set1_epi8(0x08);                                \
      low = P##ternarylogic_epi32(b, sign, mask, 0x28);  /* (first ^ second) & third */                              \
      high = P##ternarylogic_epi32(P##srli_epi16(b, 4), sign, mask, 0x28);                                           \
    }                                                                                                                \
  };
LZ_BYTES(64, __m512i, _mm512_, si512)
LZ_BYTES(32, __m256i, _mm256_, si256)
LZ_BYTES(16, __m128i, _mm_, si128)
#undef LZ_BYTES
#endif

template <int V> LZ_INLINE float sum_of(typename Bytes<V>::lanes v) {
  float lane[V / 4];
  memcpy(lane, &v, sizeof v);
  for (int half = V / 8; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// Bytes of a block where they are known; 0: they are not.
template <int64_t N> struct Length { static constexpr int64_t BYTES = N; };

#ifndef LZ_CODES_AHEAD
#define LZ_CODES_AHEAD 4096  // bytes: a page, behind whose end the hardware does not look
#endif
#ifndef LZ_HALVES_AHEAD
#define LZ_HALVES_AHEAD 4096  // the same for four-bit codes in blocks of one vector
#endif

// Where the digits of a row of x lie, the corrections of its lanes and the scales of its blocks.
struct DigitRow {
  const int8_t* digits;
  const int32_t* corrections;
  const float* scale;
  DigitRow() = default;
  DigitRow(const Digits& x, int64_t row)
      : digits(x.data + row * x.count * x.plane()), corrections(x.lanes + row * x.lane_kinds() * x.lane_step()), scale(x.scale + row * x.blocks) {}
};

// One column of R rows, c[r * step]: the codes are a single stream, read in order, once for all rows. ND digits, vectors of V
// bytes, BITS of a code, ZERO points or none. What the codes' offset and their zero points add is taken off as whole numbers,
// before anything is rounded: a row's result does not depend on the rows beside it.
template <int R, int ND, int V, int BITS, bool ZERO>
static void dot_column(const Quantized& q, const Digits& x, const DigitRow* rows, int64_t col, float* c, int64_t step) {
  typedef Bytes<V> B;
  typedef typename B::lanes lanes;
  typedef typename B::ints ints;
  constexpr int HALVES = BITS == 4 ? 2 : 1;
  constexpr int CHAINS = R == 4 ? 1 : R == 2 || V == 64 ? 2 : 4;  // sums of their own, to hide the latency; other rows do so, too
  constexpr int OFF = BITS == 4 ? B::OFF4 : B::OFF8, GAIN = BITS == 4 ? B::GAIN4 : 1;
  const int64_t bytes = x.block / HALVES, have = q.k / HALVES, plane = x.plane(), kind = x.lane_step();
  const uint8_t* const codes = q.row(col);
  lanes total[R] = {};
  auto one = [&](auto length, int64_t b, const uint8_t* w, const float* both, float scale, int32_t zero) __attribute__((always_inline)) {
    constexpr int64_t FIXED = decltype(length)::BYTES;
    const int64_t bytes = FIXED ? FIXED : x.block / HALVES, begin = b * (bytes * HALVES);
    // A block of one vector is too short for sums of its own: the blocks beside it hide the latency.
    constexpr int USED = FIXED == V ? 1 : CHAINS;
    typename B::sums s[R][USED][ND];
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < USED; ++u)
        for (int d = 0; d < ND; ++d) s[r][u][d] = B::zero();
    if constexpr (OFF != 0 && !ZERO) {  // what the offset adds is taken off beforehand
      for (int r = 0; r < R; ++r) {
        memcpy(&s[r][0][0], rows[r].corrections + b * (V / 4), sizeof s[r][0][0]);
        if constexpr (ND == 3) memcpy(&s[r][0][2], rows[r].corrections + kind + b * (V / 4), sizeof s[r][0][2]);
      }
    }
    auto add = [&](int64_t at, int u) __attribute__((always_inline)) {
      if constexpr (BITS == 4) {
        typename B::codes low, high;
        B::halves(w + at, low, high);
        for (int r = 0; r < R; ++r)
          for (int d = 0; d < ND; ++d) {
            const int8_t* y = rows[r].digits + begin + d * plane + at * 2;
            s[r][u][d] = B::dot(s[r][u][d], low, B::plain(y));
            s[r][(u + 1) % USED][d] = B::dot(s[r][(u + 1) % USED][d], high, B::plain(y + V));
          }
      } else {
        const typename B::codes whole = B::whole(w + at);
        for (int r = 0; r < R; ++r)
          for (int d = 0; d < ND; ++d) s[r][u][d] = B::dot(s[r][u][d], whole, B::plain(rows[r].digits + begin + d * plane + at));
      }
    };
    constexpr int STEPS = CHAINS > HALVES ? CHAINS / HALVES : 1;
    int64_t at = 0;
    for (; at + STEPS * V <= bytes; at += STEPS * V) {
      for (int u = 0; u < STEPS; ++u) {
        if (u * V % 64 == 0) __builtin_prefetch(w + at + u * V + (FIXED == V ? LZ_HALVES_AHEAD : LZ_CODES_AHEAD));
        add(at + u * V, u * HALVES % USED);
      }
    }
    for (; at < bytes; at += V) add(at, 0);
    const bool near = !ZERO || (zero >= -512 && zero <= 512);  // so that no product leaves 32 bits
    const int32_t off = GAIN * (OFF + (near ? zero : 0));
    for (int r = 0; r < R; ++r) {
      ints sum[ND];
      for (int d = 0; d < ND; ++d) {
        sum[d] = bit_cast<ints>(s[r][0][d]);
        for (int u = 1; u < USED; ++u) sum[d] = sum[d] + bit_cast<ints>(s[r][u][d]);
      }
      ints low = sum[0] + (sum[1] << 8);
      lanes more = {};
      if constexpr (ZERO) {
        ints c;
        memcpy(&c, rows[r].corrections + b * (V / 4), sizeof c);
        low = low - c * off;
        if (!near) more = more - __builtin_convertvector(c, lanes) * (float(zero) * float(GAIN));
      }
      lanes f = __builtin_convertvector(low, lanes);
      if constexpr (ND == 3) {
        ints c = {};
        if constexpr (ZERO) memcpy(&c, rows[r].corrections + kind + b * (V / 4), sizeof c);
        f = f + __builtin_convertvector(sum[2] - c * off, lanes) * 65536.0f;
        if (ZERO && !near) more = more - __builtin_convertvector(c, lanes) * (float(zero) * float(GAIN) * 65536.0f);
      }
      if (ZERO) f = f + more;
      // Two products of vectors where a number from memory goes to all lanes for nothing, else one of the two numbers first.
      if constexpr (FIXED == V) total[r] = total[r] + f * both[64 * r];  // the scales of x and of the weight
      else total[r] = V == 64 ? total[r] + f * rows[r].scale[b] * scale : total[r] + f * (rows[r].scale[b] * scale);
    }
  };
  auto all = [&]() __attribute__((always_inline)) {
    const bool single = q.block >= q.k;
    const float* scales = q.scale.as<float>() + (q.scale.ndim < 2 ? 0 : col * q.scale.step(0));
    const int64_t scale_step = q.scale.ndim < 2 || single ? 0 : q.scale.step(1);
    const int64_t whole = have / bytes, each = single ? x.blocks : q.block / x.block;  // blocks of x in one of the weight
    int64_t b = 0;
    if (each == 1 && !single) {  // every block has a scale of its own, and all are whole
      if constexpr (V == 64 && BITS == 4) {  // a block of 128 is one vector: nothing is left of the loop inside
        while (bytes == V && b < whole) {
          alignas(64) float both[R][64];
          const int64_t begin = b, end = whole - b < 64 ? whole : b + 64;
          for (int r = 0; r < R; ++r)
            for (int64_t i = begin; i < end; ++i) both[r][i - begin] = rows[r].scale[i] * scales[i * scale_step];
          for (; b < end; ++b) one(Length<V>(), b, codes + b * V, both[0] + (b - begin), 0.0f, ZERO ? q.zero_whole(col, b) : 0);
        }
        if (b == whole) return;
      }
      for (; b < whole; ++b, scales += scale_step)
        one(Length<0>(), b, codes + b * bytes, nullptr, *scales * (1.0f / float(GAIN)), ZERO ? q.zero_whole(col, b) : 0);
      return;
    }
    for (int64_t group = 0; b < x.blocks; ++group, scales += scale_step) {
      const float scale = *scales * (1.0f / float(GAIN));
      const int32_t zero = ZERO ? q.zero_whole(col, group) : 0;
      const int64_t end = b + each < whole ? b + each : whole;
      for (; b < end; ++b) one(Length<0>(), b, codes + b * bytes, nullptr, scale, zero);
      if (b == whole && b < x.blocks && (single || b < (group + 1) * each)) {  // the last block is not whole
        uint8_t edge[MOST_BLOCK] = {};
        memcpy(edge, codes + b * bytes, size_t(have - b * bytes));
        one(Length<0>(), b, edge, nullptr, scale, zero);
        ++b;
      }
    }
  };
  all();
  for (int r = 0; r < R; ++r) c[r * step] = sum_of<V>(total[r]);
}

// `cols` columns of `count` rows, four rows at a time.
template <int ND, int V, int BITS, bool ZERO>
static void dot_rows(const Quantized& q, const Digits& x, const DigitRow* rows, int count, int64_t at, int cols, float* c, int64_t step) {
  int m = 0;
  for (; m + 4 <= count; m += 4)
    for (int j = 0; j < cols; ++j) dot_column<4, ND, V, BITS, ZERO>(q, x, rows + m, at + j, c + m * step + j, step);
  for (; m + 2 <= count; m += 2)
    for (int j = 0; j < cols; ++j) dot_column<2, ND, V, BITS, ZERO>(q, x, rows + m, at + j, c + m * step + j, step);
  for (; m < count; ++m)
    for (int j = 0; j < cols; ++j) dot_column<1, ND, V, BITS, ZERO>(q, x, rows + m, at + j, c + m * step + j, step);
}
template <int ND, int V> static void dot_rows(const Quantized& q, const Digits& x, const DigitRow* rows, int count, int64_t at, int cols, float* c, int64_t step) {
  if (q.bits == 4) return q.zero ? dot_rows<ND, V, 4, true>(q, x, rows, count, at, cols, c, step) : dot_rows<ND, V, 4, false>(q, x, rows, count, at, cols, c, step);
  return q.zero ? dot_rows<ND, V, 8, true>(q, x, rows, count, at, cols, c, step) : dot_rows<ND, V, 8, false>(q, x, rows, count, at, cols, c, step);
}
template <int ND> static void dot_rows(const Quantized& q, const Digits& x, const DigitRow* rows, int count, int64_t at, int cols, float* c, int64_t step) {
#if !defined(__aarch64__)
  if (x.width == 64) return dot_rows<ND, 64>(q, x, rows, count, at, cols, c, step);
  if (x.width == 32) return dot_rows<ND, 32>(q, x, rows, count, at, cols, c, step);
#endif
  dot_rows<ND, 16>(q, x, rows, count, at, cols, c, step);
}

// What the numbers of each lane of a block add up to: their products with ones.
template <int ND, int V> static void fill_lanes(const Digits& x, int64_t row) {
  typedef Bytes<V> B;
  alignas(64) int8_t one[V];
  memset(one, 1, sizeof one);
  const typename B::codes ones = B::plain(one);
  for (int64_t b = 0; b < x.blocks; ++b) {
    typename B::ints sum[ND];
    for (int d = 0; d < ND; ++d) {
      const int8_t* y = x.data + (row * ND + d) * x.plane() + b * x.block;
      typename B::sums s = B::zero();
      for (int64_t at = 0; at < x.block; at += V) s = B::dot(s, ones, B::plain(y + at));
      sum[d] = bit_cast<typename B::ints>(s);
    }
    int32_t* to = x.lanes + row * x.lane_kinds() * x.lane_step() + b * (V / 4);
    const typename B::ints low = (sum[0] + (sum[1] << 8)) * x.times;
    memcpy(to, &low, sizeof low);
    if constexpr (ND == 3) {
      const typename B::ints high = sum[2] * x.times;
      memcpy(to + x.lane_step(), &high, sizeof high);
    }
  }
}

template <int ND> static void fill_lanes(const Digits& x, int64_t row) {
#if !defined(__aarch64__)
  if (x.width == 64) return fill_lanes<ND, 64>(x, row);
  if (x.width == 32) return fill_lanes<ND, 32>(x, row);
#endif
  fill_lanes<ND, 16>(x, row);
}

// How rows of x are to be written for this weight; a block of 0: the bytes of a block do not fill vectors. A block of x lies
// inside a block of the weight, and holds whole vectors of codes.
inline Digits digits_for(const Quantized& q) {
  const int64_t halves = q.bits == 4 ? 2 : 1;
  int64_t block = q.block <= MOST_BLOCK ? q.block : q.block == q.k || q.block % 256 == 0 ? 256 : q.block % 128 == 0 ? 128 : 0;
  if (q.block == q.k && block % (16 * halves)) block = block <= 128 ? 128 : 256;
  int width = WIDEST;
  while (width > 16 && block % (width * halves)) width /= 2;
  if (block % (width * halves)) block = 0;
  const bool offset = bool(q.zero) || (q.bits == 4 ? Bytes<WIDEST>::OFF4 : Bytes<WIDEST>::OFF8) != 0;
  const int32_t times = q.zero ? 1 : q.bits == 4 ? -Bytes<WIDEST>::OFF4 : -Bytes<WIDEST>::OFF8;
  return {nullptr, nullptr, nullptr, block, block ? (q.k + block - 1) / block : 0, q.rows, 3, width, int(q.bits), offset, times};
}

// Digits for rows whose blocks have a largest number `crest` times their mean; 0: floats. Beside a number far above the rest of
// its block the others would keep too few digits: take more, or floats.
LZ_INLINE int digits_of(float crest, DType dtype) {
  if (!(crest <= (dtype == F32 ? 8.0f : 4096.0f))) return 0;
  return dtype == BF16 && crest <= 24.0f ? 2 : 3;
}

}  // namespace LZ_ISA
}  // namespace lz
