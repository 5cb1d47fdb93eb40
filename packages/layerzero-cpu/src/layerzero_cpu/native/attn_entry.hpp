// From the arguments of a call to a Problem: sizes are compared here, before any kernel runs, so that no kernel can read
// outside its tensors whatever it is given.
#pragma once
#include "attn.hpp"

namespace lz {
namespace LZ_ISA {

// query, key, value [B, H, S, D], out; lse, mask, slopes or None; scale, softcap (0: none), causal (0 no, 1 top left,
// 2 bottom right), window left and right (-1: open); sinks.
#define DENSE_SIGNATURE "TTTTOOOffiiio"
// query [tokens, H, D], key pages, value pages, block table, context lengths, query lengths or None, out; lse, slopes or
// None; scale, softcap, window left and right; 1 for pages [blocks, heads, page, dim] (else [blocks, page, heads, dim]), plus
// 2 where a query sees the keys behind its own; sinks.
#define PAGED_SIGNATURE "TTTTTOTOOffiiio"

constexpr int64_t MOST_DIM = 256, MOST_LATENT = 512;

LZ_INLINE bool floats(DType t) { return t == F32 || t == BF16 || t == F16; }
LZ_INLINE int64_t integer(const Tensor& t, int64_t i) {
  return t.dtype == I64 ? t.as<int64_t>()[i * t.stride[0]] : t.as<int32_t>()[i * t.stride[0]];
}

// Room for the sequences of a call: a few in place, more from the heap.
struct Sequences {
  Sequence few[32];
  Sequence* all;
  explicit Sequences(int64_t n) : all(few) {
    if (n > 32) all = static_cast<Sequence*>(malloc(size_t(n) * sizeof(Sequence)));
  }
  ~Sequences() {
    if (all != few) free(all);
  }
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;
};

inline Status set_slopes(const Tensor& slopes, int64_t batch, int64_t heads, Rules& rules) {
  if (!slopes) return nullptr;
  if (slopes.dtype != F32) return "alibi slopes must be float32";
  const bool each = slopes.ndim == 2;
  if (slopes.ndim < 1 || slopes.ndim > 2 || slopes.size(-1) != heads || (each && slopes.size(0) != batch))
    return "alibi slopes must be [heads] or [batch, heads]";
  rules.slopes = slopes.as<float>();
  rules.slopes_batch = each ? slopes.step(0) : 0;
  rules.slopes_head = slopes.step(-1);
  return nullptr;
}

inline Status set_sinks(const Tensor& sinks, int64_t heads, Rules& rules) {
  if (!sinks) return nullptr;
  if (sinks.dtype != F32 || sinks.ndim != 1 || sinks.size(0) != heads) return "sinks must be float32 [heads]";
  rules.sinks = sinks.as<float>();
  rules.sinks_head = sinks.step(0);
  return nullptr;
}

inline Status set_mask(const Tensor& mask, DType dtype, const int64_t* sizes, Rules& rules) {
  if (!mask) return nullptr;
  if (mask.ndim != 4) return "a mask must have four axes";
  if (mask.dtype != BOOL && mask.dtype != F32 && mask.dtype != dtype) return "a mask must be bool, float32 or of the query's dtype";
  int64_t* steps[4] = {&rules.mask_batch, &rules.mask_head, &rules.mask_query, &rules.mask_key};
  for (int i = 0; i < 4; ++i) {
    if (mask.shape[i] != 1 && mask.shape[i] != sizes[i]) return "a mask must broadcast to [batch, heads, queries, keys]";
    *steps[i] = mask.shape[i] == 1 ? 0 : mask.stride[i];
  }
  rules.mask = mask.data;
  rules.mask_dtype = mask.dtype;
  return nullptr;
}

// A bound beyond FAR is as good as none, and added to a position it would not fit into 64 bits.
inline void set_window(int64_t left, int64_t right, bool causal, Rules& rules) {
  rules.left = left < 0 || left > FAR ? FAR : left;
  rules.right = right < 0 || right > FAR ? FAR : right;
  if (causal) rules.right = 0;
}

// Common to both forms: q and out are [..., heads, dim] views with the axes named here.
inline Status set_heads(const Tensor& q, const Tensor& out, const Tensor& k, const Tensor& v, int64_t heads, int64_t kv_heads,
                        Problem& p, int64_t most = MOST_DIM) {
  if (!floats(q.dtype) || k.dtype != q.dtype || v.dtype != q.dtype || out.dtype != q.dtype)
    return "query, key, value and out must share a dtype: float32, bfloat16 or float16";
  if (!readable(q) || !readable(k) || !readable(v) || !readable(out)) return RELAYOUT;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.dim = q.size(-1);
  p.dim_v = v.size(-1);
  if (k.size(-1) != p.dim || out.size(-1) != p.dim_v) return "head_dim of query and key, and of value and out, must agree";
  if (p.dim < 1 || p.dim > most || p.dim_v < 1 || p.dim_v > most) return "head_dim is too small or too large";
  if (kv_heads < 1 || heads % kv_heads) return "query heads must be a multiple of key heads";
  p.group = heads / kv_heads;
  p.q = q.data;
  p.out = out.data;
  return nullptr;
}

template <class F> inline Status with_dense(Call& call, const F& run) {
  const Tensor &q = call.t(0), &k = call.t(1), &v = call.t(2), &out = call.t(3), &lse = call.t(4);
  if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4 || out.ndim != 4) return "attention takes tensors of four axes";
  Problem p = {};
  if (Status wrong = set_heads(q, out, k, v, q.size(1), k.size(1), p)) return wrong;
  const int64_t batch = q.size(0), queries = q.size(2), keys = k.size(2);
  if (k.size(0) != batch || v.size(0) != batch || v.size(1) != p.kv_heads || v.size(2) != keys)
    return "query, key and value must share batch, and key and value their heads and length";
  if (out.size(0) != batch || out.size(1) != p.heads || out.size(2) != queries) return "out must have the query's shape";
  p.rules.scale = float(call.f(7));
  p.rules.softcap = float(call.f(8));
  const int64_t causal = call.i(9);
  set_window(call.i(10), call.i(11), causal != 0, p.rules);
  const int64_t sizes[4] = {batch, p.heads, queries, keys};
  if (Status wrong = set_mask(call.t(5), q.dtype, sizes, p.rules)) return wrong;
  if (Status wrong = set_slopes(call.t(6), batch, p.heads, p.rules)) return wrong;
  if (Status wrong = set_sinks(call.t(12), p.heads, p.rules)) return wrong;
  if (lse) {
    if (lse.dtype != F32 || lse.ndim != 3 || lse.size(0) != batch || lse.size(1) != p.heads || lse.size(2) != queries)
      return "lse must be float32 [batch, heads, queries]";
    p.lse = lse.as<float>();
    p.lse_head = lse.step(1);
    p.lse_seq = lse.step(2);
  }
  p.kv = {k.data, v.data, k.step(0), k.step(1), k.step(2), 0, v.step(0), v.step(1), v.step(2), 0, nullptr, 0, 0, 0, false, nullptr, 0, 0};
  p.q_head = q.step(1), p.q_seq = q.step(2);
  p.out_head = out.step(1), p.out_seq = out.step(2);
  p.threads = call.threads;
  p.sequences = batch;
  if (batch == 0 || queries == 0 || p.heads == 0) return nullptr;
  Sequences room(batch);
  if (!room.all) return "no memory for the batch";
  for (int64_t b = 0; b < batch; ++b)
    room.all[b] = {b, b * q.step(0), b * out.step(0), lse ? b * lse.step(0) : 0, queries, keys, causal == 1 ? 0 : keys - queries, 0};
  p.sequence = room.all;
  return run(p, q.dtype);
}

inline Status check_table(const Tensor& table, const Tensor& contexts, const Tensor& lengths) {
  if (table.ndim != 2 || contexts.ndim != 1 || table.size(0) != contexts.size(0)) return "block table [B, pages] and lengths [B] must agree";
  if ((table.dtype != I32 && table.dtype != I64) || (contexts.dtype != I32 && contexts.dtype != I64)) return "the metadata must be int32 or int64";
  if (lengths && (lengths.ndim != 1 || lengths.size(0) != contexts.size(0) || (lengths.dtype != I32 && lengths.dtype != I64)))
    return "query lengths must be int32 or int64 [B]";
  return nullptr;
}

// The sequences of a batch of pages, each checked against its row of the table, then the kernel.
template <class F>
inline Status run_pages(Problem& p, const Tensor& table, const Tensor& contexts, const Tensor& lengths, int64_t tokens, int64_t blocks,
                        DType dtype, const F& run) {
  const int64_t batch = contexts.size(0), page = p.kv.page;
  Sequences room(batch);
  if (!room.all) return "no memory for the batch";
  int64_t at = 0, count = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t keys = integer(contexts, b), queries = lengths ? integer(lengths, b) : 1;
    if (keys < 0 || queries < 0 || queries > tokens - at) return "lengths must not be negative, and query lengths sum to the tokens";
    const int64_t used = page ? (keys + page - 1) / page : (keys ? FAR : 0);
    if (used > table.size(1)) return "a context is longer than its row of pages";
    for (int64_t n = 0; n < used; ++n) {
      const int64_t number = p.kv.block(b, n);
      if (number < 0 || number >= blocks) return "a page number lies outside the cache";
    }
    if (queries)
      room.all[count++] = {b, at * p.q_seq, at * p.out_seq, at * p.lse_seq, queries, keys, keys - queries, at};
    at += queries;
  }
  if (at != tokens) return "query lengths must sum to the number of query tokens";
  p.sequence = room.all;
  p.sequences = count;
  return count && p.heads ? run(p, dtype) : nullptr;
}

template <class F> inline Status with_pages(Call& call, const F& run) {
  const Tensor &q = call.t(0), &k = call.t(1), &v = call.t(2), &table = call.t(3), &contexts = call.t(4);
  const Tensor &lengths = call.t(5), &out = call.t(6), &lse = call.t(7);
  if (q.ndim != 3 || k.ndim != 4 || v.ndim != 4 || out.ndim != 3) return "paged attention takes query [tokens, heads, dim] and pages of four axes";
  const bool hnd = call.i(13) & 1, causal = !(call.i(13) & 2);
  const int head_axis = hnd ? 1 : 2, seq_axis = hnd ? 2 : 1;
  Problem p = {};
  if (Status wrong = set_heads(q, out, k, v, q.size(1), k.size(head_axis), p)) return wrong;
  const int64_t tokens = q.size(0), blocks = k.size(0), page = k.size(seq_axis);
  if (v.size(0) != blocks || v.size(1) != k.size(1) || v.size(2) != k.size(2)) return "key and value pages must agree";
  if (out.size(0) != tokens || out.size(1) != p.heads) return "out must have the query's shape";
  if (Status wrong = check_table(table, contexts, lengths)) return wrong;
  const int64_t batch = contexts.size(0);
  p.rules.scale = float(call.f(9));
  p.rules.softcap = float(call.f(10));
  set_window(call.i(11), call.i(12), causal, p.rules);
  if (Status wrong = set_slopes(call.t(8), batch, p.heads, p.rules)) return wrong;
  if (Status wrong = set_sinks(call.t(14), p.heads, p.rules)) return wrong;
  if (lse) {
    if (lse.dtype != F32 || lse.ndim != 2 || lse.size(0) != tokens || lse.size(1) != p.heads) return "lse must be float32 [tokens, heads]";
    p.lse = lse.as<float>();
    p.lse_head = lse.step(1);
    p.lse_seq = lse.step(0);
  }
  p.kv = {k.data,    v.data, 0, k.step(head_axis), k.step(seq_axis), k.step(0), 0, v.step(head_axis), v.step(seq_axis), v.step(0),
          table.data, table.step(0), table.step(1), page, table.dtype == I64, nullptr, 0, 0};
  p.q_head = q.step(1), p.q_seq = q.step(0);
  p.out_head = out.step(1), p.out_seq = out.step(0);
  p.threads = call.threads;
  return run_pages(p, table, contexts, lengths, tokens, blocks, q.dtype, run);
}

// query [tokens, heads, latent] and its rotated part [tokens, heads, rotated]; pages of latent vectors [blocks, page, latent],
// which are keys and values at once, and of rotated keys [blocks, page, rotated]; block table, context lengths, query lengths
// or None, out; lse or None; scale.
#define LATENT_SIGNATURE "TTTTTTOTOf"

template <class F> inline Status with_latent(Call& call, const F& run) {
  const Tensor &q = call.t(0), &q_rest = call.t(1), &k = call.t(2), &rest = call.t(3), &table = call.t(4), &contexts = call.t(5);
  const Tensor &lengths = call.t(6), &out = call.t(7), &lse = call.t(8);
  if (q.ndim != 3 || q_rest.ndim != 3 || k.ndim != 3 || rest.ndim != 3 || out.ndim != 3) return "latent attention takes tensors of three axes";
  Problem p = {};
  if (Status wrong = set_heads(q, out, k, k, q.size(1), 1, p, MOST_LATENT)) return wrong;
  if (!readable(q_rest) || !readable(rest)) return RELAYOUT;
  const int64_t tokens = q.size(0), blocks = k.size(0), page = k.size(1);
  p.dim_rest = q_rest.size(2);
  if (q_rest.dtype != q.dtype || rest.dtype != q.dtype || q_rest.size(0) != tokens || q_rest.size(1) != p.heads ||
      rest.size(0) != blocks || rest.size(1) != page || rest.size(2) != p.dim_rest || p.dim_rest < 1 || p.dim_rest > MOST_DIM)
    return "the rotated parts must fit query and pages";
  if (out.size(0) != tokens || out.size(1) != p.heads) return "out must have the query's shape";
  if (Status wrong = check_table(table, contexts, lengths)) return wrong;
  p.rules.scale = float(call.f(9));
  set_window(-1, -1, true, p.rules);
  if (lse) {
    if (lse.dtype != F32 || lse.ndim != 2 || lse.size(0) != tokens || lse.size(1) != p.heads) return "lse must be float32 [tokens, heads]";
    p.lse = lse.as<float>();
    p.lse_head = lse.step(1);
    p.lse_seq = lse.step(0);
  }
  p.kv = {k.data,    k.data, 0, 0, k.step(1), k.step(0), 0, 0, k.step(1), k.step(0), table.data, table.step(0), table.step(1),
          page, table.dtype == I64, rest.data, rest.step(1), rest.step(0)};
  p.q_rest = q_rest.data;
  p.q_rest_head = q_rest.step(1), p.q_rest_seq = q_rest.step(0);
  p.q_head = q.step(1), p.q_seq = q.step(0);
  p.out_head = out.step(1), p.out_seq = out.step(0);
  p.threads = call.threads;
  return run_pages(p, table, contexts, lengths, tokens, blocks, q.dtype, run);
}

}  // namespace LZ_ISA
}  // namespace lz
