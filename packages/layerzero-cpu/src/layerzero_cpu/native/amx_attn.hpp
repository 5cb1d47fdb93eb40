// The inner parts of prefill attention on tiles, all turned on their side: scores are kept as [key][row], so that a register
// holds one key's scores for 16 rows (a row is one query of one head). Maxima, sums, masks and the rescaling of a softmax
// then need nothing across lanes. Keys are first operands as they lie; queries, second operand, are turned into pairs once
// a block; values are turned once a call; the weights come out of the softmax as the pairs that the second product wants.
#pragma once
#include "amx.hpp"
#include "attn.hpp"

namespace lz {
namespace LZ_ISA {

constexpr int UNIT = 32;          // keys of one unit: two tiles of scores, one step of the second product
constexpr int BLOCK_UNITS = 8;    // units between two looks at the running maximum
constexpr int STRIP = 32;         // rows computed together: two tiles
constexpr int TILE_BYTES = 1024;
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;
constexpr float SLACK = 8.0f;     // a maximum may grow by 2^8 before sums are rescaled: nothing is lost in float

// The packed keys and values of one key head of one sequence, from unit `first` on.
struct Packed {
  const Sequence* seq;
  int64_t head, first, units;
  char *keys, *values;  // tiles [unit][2][dim / 32] of 16 keys x 32, and [unit][dim_v / 16] of 16 columns x 32 keys
};

// Padded sizes, in tiles.
struct Sizes {
  int steps, columns;  // dim / 32, dim_v / 16
  int64_t key_bytes() const { return int64_t(2) * steps * TILE_BYTES; }
  int64_t value_bytes() const { return int64_t(columns) * TILE_BYTES; }
};

// One unit: keys copied to where a tile finds its 16 rows side by side, values turned. What lies behind the last key or the
// last column is zero.
static void pack_unit(const Problem& p, const Sizes& sizes, const Packed& to, int64_t unit) {
  const int64_t first = (to.first + unit) * UNIT, left = to.seq->keys - first;
  const int n = int(left < UNIT ? left : UNIT);
  const bf16 *kp[UNIT], *vp[UNIT];
  p.kv.rows(to.seq->batch, to.head, first, n, kp, vp);
  char* keys = to.keys + unit * sizes.key_bytes();
  for (int j = 0; j < UNIT; ++j) {
    char* row = keys + j / 16 * sizes.steps * TILE_BYTES + j % 16 * 64;
    for (int s = 0; s < sizes.steps; ++s) {
      const int64_t bytes = j < n ? (p.dim - s * 32) * 2 : 0;
      const int64_t words = bytes >= 64 ? 16 : bytes / 4;
      __m512i line = _mm512_maskz_loadu_epi32(__mmask16((1u << words) - 1u), reinterpret_cast<const char*>(kp[j < n ? j : 0]) + s * 64);
      _mm512_storeu_si512(row + s * TILE_BYTES, line);
      if (bytes < 64 && bytes % 4) memcpy(row + s * TILE_BYTES + words * 4, &kp[j][s * 32 + words * 2], 2);
    }
  }
  alignas(64) uint32_t pairs[16][16];
  const uint32_t* at[16];
  for (int i = 0; i < 16; ++i) at[i] = pairs[i];
  const __m256i none = _mm256_setzero_si256();
  for (int c = 0; c < sizes.columns; ++c) {
    const int64_t some = p.dim_v - c * 16;
    const __mmask16 mask = some >= 16 ? __mmask16(0xffff) : __mmask16((1u << some) - 1u);
    for (int i = 0; i < 16; ++i) {
      const __m256i a = 2 * i < n ? _mm256_maskz_loadu_epi16(mask, vp[2 * i] + c * 16) : none;
      const __m256i b = 2 * i + 1 < n ? _mm256_maskz_loadu_epi16(mask, vp[2 * i + 1] + c * 16) : none;
      _mm512_storeu_si512(pairs[i], _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
    }
    turn_words(at, 16, 16, reinterpret_cast<uint32_t*>(to.values + unit * sizes.value_bytes() + c * TILE_BYTES));
  }
}

// The scores of one unit and the 32 rows of a strip, left in tiles 0 … 3. q: tiles [2][steps] of pairs.
static LZ_INLINE void score_unit(const char* keys, const char* q, int steps) {
  settled();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char *k2 = keys + steps * TILE_BYTES, *q2 = q + steps * TILE_BYTES;
  for (int s = 0; s < steps; ++s) {
    _tile_loadd(4, keys + s * TILE_BYTES, 64);
    _tile_loadd(6, q + s * TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, q2 + s * TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, k2 + s * TILE_BYTES, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
// They are written as scores[2][32 keys][16 rows]. Apart from the products, so that vector code may stand between: its loads
// would have to wait for stores before them that have the same place in a page, and four tiles have every place.
static LZ_INLINE void keep_unit(float* scores) {
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + 512, 64);
  _tile_stored(2, scores + 256, 64);
  _tile_stored(3, scores + 768, 64);
}

// acc[columns][2][16 columns][16 rows] += values times weights, over the units of a block.
static LZ_INLINE void weigh_units(const char* values, const uint32_t* weights, int units, int columns, float* acc, bool fresh) {
  settled();
  const int64_t step = int64_t(columns) * TILE_BYTES;
  int c = 0;
  for (; c + 2 <= columns; c += 2, acc += 1024) {
    if (fresh) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, acc, 64);
      _tile_loadd(1, acc + 256, 64);
      _tile_loadd(2, acc + 512, 64);
      _tile_loadd(3, acc + 768, 64);
    }
    const char* v = values + c * TILE_BYTES;
    for (int u = 0; u < units; ++u, v += step) {
      _tile_loadd(4, v, 64);
      _tile_loadd(6, weights + u * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + u * 512 + 256, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, v + TILE_BYTES, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, acc, 64);
    _tile_stored(1, acc + 256, 64);
    _tile_stored(2, acc + 512, 64);
    _tile_stored(3, acc + 768, 64);
  }
  if (c == columns) return;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, acc, 64);
    _tile_loadd(1, acc + 256, 64);
  }
  const char* v = values + c * TILE_BYTES;
  for (int u = 0; u < units; ++u, v += step) {
    _tile_loadd(4, v, 64);
    _tile_loadd(6, weights + u * 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + u * 512 + 256, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, acc, 64);
  _tile_stored(1, acc + 256, 64);
}

// 2^x to 3e-6; 0 from -127 down; a NaN stays one.
LZ_INLINE vf exp2_quick(vf x) {
  x = vmax(splat(-127.0f), x);              // the second where it is a NaN
  const vf t = x + (12582912.0f + 127.0f);  // its last bits are the nearest whole number, with the exponent's bias
  const vf r = x - (t - (12582912.0f + 127.0f));
  vf y = splat(0.009570102207362652f);
  y = fma(y, r, splat(0.05591785907745361f));
  y = fma(y, r, splat(0.240247443318367f));
  y = fma(y, r, splat(0.6931217908859253f));
  y = fma(y, r, splat(0.9999992847442627f));
  return y * bit_cast<vf>(bit_cast<vi>(t) << 23);
}

// One tile's running softmax: 16 rows side by side, the maximum in powers of two.
struct Rows16 {
  vf max, sum;
};

// Looks at the scores of a block, raises the maximum where it must be; returns whether anything has to be rescaled by
// `factor` then. `gain` makes a score the power of two that it stands for.
LZ_INLINE bool raise(const float* scores, int units, float gain, Rows16& rows, vf& factor) {
  vf top[4] = {splat(-INF), splat(-INF), splat(-INF), splat(-INF)};
  for (int u = 0; u < units; ++u, scores += 1024)
    for (int i = 0; i < UNIT; i += 4)
      for (int j = 0; j < 4; ++j) top[j] = vmax(load(scores + (i + j) * 16), top[j]);  // a NaN is passed over
  const vf peak = vmax(vmax(top[0], top[1]), vmax(top[2], top[3])) * gain;
  const vi higher = peak > rows.max + SLACK;  // from -inf: any score is
  const vf raised = select(higher, peak, rows.max);
  factor = select(higher, exp2_quick(rows.max - raised), splat(1.0f));
  rows.sum = rows.sum * factor;
  rows.max = raised;
  return _mm512_reduce_max_ps(bit_cast<__m512>(select(higher, splat(1.0f), splat(0.0f)))) != 0.0f;
}

// weights[16 pairs of keys][16 rows] from scores[32 keys][16 rows].
LZ_INLINE void soften_unit(const float* scores, float gain, Rows16& rows, __m512i order, uint32_t* weights) {
  const vf base = select(rows.max == splat(-INF), splat(0.0f), rows.max), times = splat(gain);
  vf even = rows.sum, odd = splat(0.0f);
  for (int i = 0; i < UNIT; i += 2) {
    const vf a = exp2_quick(fma(load(scores + i * 16), times, -base));
    const vf b = exp2_quick(fma(load(scores + i * 16 + 16), times, -base));
    even = even + a, odd = odd + b;
    const __m512bh both = _mm512_cvtne2ps_pbh(bit_cast<__m512>(b), bit_cast<__m512>(a));
    _mm512_storeu_si512(weights + i * 8, _mm512_permutexvar_epi16(order, bit_cast<__m512i>(both)));
  }
  rows.sum = even + odd;
}

// Places of two times 16 halves, taken alternately.
LZ_INLINE __m512i alternately() {
  uint16_t at[32];
  for (int i = 0; i < 32; ++i) at[i] = uint16_t(i / 2 + i % 2 * 16);
  return _mm512_loadu_si512(at);
}

}  // namespace LZ_ISA
}  // namespace lz
