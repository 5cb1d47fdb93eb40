// What all attention kernels share: where a sequence's rows lie, what a query row may see, and its softmax.
//
// The work is cut by rows and key tiles. A "row" is one query of one head; the rows of the heads of a GQA group share their
// keys, so they are computed together and each key is read once for all of them.
#pragma once
#include <stdlib.h>

#include "gemm_finish.hpp"

namespace lz {
namespace LZ_ISA {

constexpr int TILE = 64;  // keys taken together
constexpr int64_t FAR = int64_t(1) << 62;
constexpr float INF = __builtin_inff();

// Keys and values of one call, dense (page == 0) or in pages. Strides in elements.
struct KV {
  const char* k;
  const char* v;
  int64_t k_batch, k_head, k_seq, k_block;
  int64_t v_batch, v_head, v_seq, v_block;
  const char* table;  // page numbers
  int64_t table_row, table_col, page;
  bool wide;  // 64-bit page numbers
  // A second part of each key in pages of its own (latent attention: the rotated part), or null.
  const char* rest;
  int64_t rest_seq, rest_block;

  int64_t block(int64_t b, int64_t n) const {
    int64_t at = b * table_row + n * table_col;
    return wide ? reinterpret_cast<const int64_t*>(table)[at] : reinterpret_cast<const int32_t*>(table)[at];
  }
  // Pointers to keys first … first + n - 1 of sequence b, head h.
  template <class T> void rows(int64_t b, int64_t h, int64_t first, int n, const T** kp, const T** vp) const {
    const T* kb = reinterpret_cast<const T*>(k) + h * k_head;
    const T* vb = reinterpret_cast<const T*>(v) + h * v_head;
    if (!page) {
      kb += b * k_batch + first * k_seq;
      vb += b * v_batch + first * v_seq;
      for (int j = 0; j < n; ++j) kp[j] = kb + j * k_seq, vp[j] = vb + j * v_seq;
      return;
    }
    int64_t number = first / page, at = first % page;
    for (int j = 0; j < n; ++number, at = 0) {
      int64_t block_at = block(b, number);
      const T *ks = kb + block_at * k_block, *vs = vb + block_at * v_block;
      for (; at < page && j < n; ++at, ++j) kp[j] = ks + at * k_seq, vp[j] = vs + at * v_seq;
    }
  }
  template <class T> void rest_rows(int64_t b, int64_t first, int n, const T** rp) const {
    for (int j = 0; j < n; ++j) {
      const int64_t at = first + j;
      rp[j] = reinterpret_cast<const T*>(rest) + block(b, at / page) * rest_block + at % page * rest_seq;
    }
  }
};

// One sequence: its queries and its length. Query i stands at key position i + shift.
struct Sequence {
  int64_t batch, q_at, out_at, lse_at;  // offsets in elements
  int64_t queries, keys, shift;
  int64_t first;  // number of its first query among all
};

// What the scores go through after the product, and what a row may see.
struct Rules {
  float scale, softcap;  // softcap 0: none
  int64_t left, right;   // keys seen on either side of the query's position; FAR: all
  const float* slopes;   // ALiBi, or null
  int64_t slopes_batch, slopes_head;
  const float* sinks;  // one more score a head, without a value; or null
  int64_t sinks_head;
  const char* mask;  // or null
  DType mask_dtype;
  int64_t mask_batch, mask_head, mask_query, mask_key;
};

struct Problem {
  KV kv;
  Rules rules;
  const Sequence* sequence;
  int64_t sequences, heads, kv_heads, group, dim, dim_v;
  const char* q;
  int64_t q_head, q_seq;
  const char* q_rest;  // the part of the queries for `kv.rest`
  int64_t dim_rest, q_rest_head, q_rest_seq;
  char* out;
  int64_t out_head, out_seq;
  float* lse;  // or null
  int64_t lse_head, lse_seq;
  int threads;
};

// The keys a query row may see: [begin, end).
struct Band {
  int64_t begin, end;
};
LZ_INLINE Band band_of(const Rules& rules, const Sequence& s, int64_t query) {
  int64_t at = query + s.shift;
  int64_t begin = rules.left == FAR || at - rules.left < 0 ? 0 : at - rules.left;
  int64_t end = rules.right == FAR || at + rules.right >= s.keys ? s.keys : at + rules.right + 1;
  if (begin > s.keys) begin = s.keys;
  return {begin, end < begin ? begin : end};
}

LZ_INLINE vi lane_numbers() {
  vi r;
  for (int i = 0; i < W; ++i) r[i] = i;
  return r;
}

// Scores of one row for keys first … first + n - 1, already scaled: cap, bias and mask them. Lanes n … TILE-1 and keys
// outside the band become -inf.
__attribute__((noinline, unused)) static void finish_scores(float* s, int n, int64_t first, const Problem& p, const Sequence& seq,
                                                           int64_t head, int64_t query, Band band) {
  const Rules& rules = p.rules;
  const int width = (n + W - 1) / W * W;
  if (rules.softcap != 0.0f) {
    float inverse = 1.0f / rules.softcap;
    for (int j = 0; j < width; j += W) store(s + j, vtanh(load(s + j) * inverse) * rules.softcap);
  }
  if (rules.slopes) {
    float slope = rules.slopes[seq.batch * rules.slopes_batch + head * rules.slopes_head];
    vf at = splat(float(query + seq.keys - seq.queries - first)) - __builtin_convertvector(lane_numbers(), vf);
    for (int j = 0; j < width; j += W, at = at - float(W)) store(s + j, load(s + j) - slope * vabs(at));
  }
  if (rules.mask) {
    int64_t at = seq.batch * rules.mask_batch + head * rules.mask_head + query * rules.mask_query + first * rules.mask_key;
    for (int j = 0; j < n; ++j, at += rules.mask_key) {
      if (rules.mask_dtype == BOOL) s[j] = rules.mask[at] ? s[j] : -INF;
      else if (rules.mask_dtype == F32) s[j] += reinterpret_cast<const float*>(rules.mask)[at];
      else if (rules.mask_dtype == BF16) s[j] += to_float(reinterpret_cast<const bf16*>(rules.mask)[at]);
      else s[j] += to_float(reinterpret_cast<const f16*>(rules.mask)[at]);
    }
  }
  int64_t low = band.begin - first, high = band.end - first;
  if (low > n) low = n;
  if (high < 0) high = 0;
  for (int64_t j = 0; j < low; ++j) s[j] = -INF;
  for (int64_t j = high < n ? high : n; j < TILE; ++j) s[j] = -INF;
}

LZ_INLINE float exp_of(float x) { return vexp(splat(x))[0]; }

// ln x for x > 0, to an ulp or so: exponent and mantissa apart, then the series of atanh.
LZ_INLINE float log_of(float x) {
  if (!(x < INF)) return x;
  float lift = 0.0f;
  if (x < 1.17549435e-38f) x *= 8388608.0f, lift = 23.0f;
  const uint32_t bits = bit_cast<uint32_t>(x) - 0x3f3504f3u;  // sqrt(1/2): the mantissa ends between it and sqrt(2)
  const float exponent = float(int32_t(bits) >> 23) - lift;
  const float m = bit_cast<float>((bits & 0x007fffffu) + 0x3f3504f3u);
  const float z = (m - 1.0f) / (m + 1.0f), w = z * z;
  const float series = 2.0f * z + 2.0f * z * w * (0.333333333f + w * (0.2f + w * (0.142857143f + w * 0.111111111f)));
  return exponent * 0.693147181f + series;
}

#if LZ_LANES == 4 && defined(__aarch64__) && !defined(LZ_ISA_portable)
LZ_INLINE float lane_sum(vf v) { return vaddvq_f32(v); }
LZ_INLINE float lane_max(vf v) { return vmaxvq_f32(v); }
#elif LZ_LANES == 16
LZ_INLINE float lane_sum(vf v) { return _mm512_reduce_add_ps(bit_cast<__m512>(v)); }
LZ_INLINE float lane_max(vf v) { return _mm512_reduce_max_ps(bit_cast<__m512>(v)); }
#else
LZ_INLINE float lane_sum(vf v) { return sum(v); }
LZ_INLINE float lane_max(vf v) { return max_of(v); }
#endif

// The running softmax of one row: its largest score so far and the sum of exponentials relative to it.
struct Running {
  float max, sum;
};

// Turns the scores of a tile into weights and returns what everything accumulated before must be multiplied by.
LZ_INLINE float soften(float* s, int width, Running& r) {
  vf top = splat(-INF);
  for (int j = 0; j < width; j += W) top = vmax(load(s + j), top);  // a NaN score is passed over here and by e^x kept
  float peak = lane_max(top);
  float max = peak > r.max ? peak : r.max;
  float base = max == -INF ? 0.0f : max;  // nothing seen yet: every weight is e^-inf
  vf total = splat(0.0f), b = splat(base);
  for (int j = 0; j < width; j += W) {
    const vf below = load(s + j) - b;
    const vf e = select(below < splat(-87.0f), splat(0.0f), exp_normal(below));  // a NaN passes
    store(s + j, e);
    total = total + e;
  }
  float factor = max == r.max ? 1.0f : exp_of(r.max - max);
  r.sum = r.sum * factor + lane_sum(total);
  r.max = max;
  return factor;
}

LZ_INLINE float log_sum(const Running& r) {
  if (r.max == INF || r.sum == 0.0f) return r.max;
  return r.max + log_of(r.sum);
}

// Lets the sink of a head join the sum of a row; what was accumulated before must be multiplied by the result.
LZ_INLINE float join_sink(const Rules& rules, int64_t head, Running& r) {
  const float sink = rules.sinks[head * rules.sinks_head];
  const float max = sink > r.max ? sink : r.max;
  if (max == -INF) return 1.0f;
  const float factor = r.max == max ? 1.0f : r.max == -INF ? 0.0f : exp_of(r.max - max);
  r.sum = r.sum * factor + (sink == max ? 1.0f : sink == -INF ? 0.0f : exp_of(sink - max));
  r.max = max;
  return factor;
}

// One finished row: divided by its sum and stored; a row that sees nothing gives zeros.
template <class T>
inline void write_row(const Problem& p, const Sequence& seq, int64_t head, int64_t query, Running run, const float* acc) {
  T* out = reinterpret_cast<T*>(p.out) + seq.out_at + head * p.out_head + query * p.out_seq;
  const float factor = p.rules.sinks ? join_sink(p.rules, head, run) : 1.0f;
  const vf inverse = splat(run.sum == 0.0f ? 0.0f : factor / run.sum);
  int64_t c = 0;
  for (; c + W <= p.dim_v; c += W) store(out + c, load(acc + c) * inverse);
  if (c < p.dim_v) store_part(out + c, load(acc + c) * inverse, p.dim_v - c);
  if (p.lse) p.lse[seq.lse_at + head * p.lse_head + query * p.lse_seq] = log_sum(run);
}

LZ_INLINE void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at);
}

}  // namespace LZ_ISA
}  // namespace lz
