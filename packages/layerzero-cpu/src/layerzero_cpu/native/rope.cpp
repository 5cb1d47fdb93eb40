// unit: portable avx2 avx512 neon
// Rotary embedding of q and k. Tokens are taken in blocks: the block's table rows are widened once and used for every head.
#include "pair.hpp"

LZ_BEGIN

namespace {

constexpr int64_t BLOCK = 8;  // tokens whose table rows stay in the first cache

// A pair (a, b) becomes (a·c1 − b·s1, b·c2 + a·s2); with one angle a pair c2 is c1 and s2 is s1.
struct Turn {
  const float *c1, *s1, *c2, *s2;
};

template <class T> LZ_INLINE void turn_halves(const T* x, T* out, int64_t h, Turn t) {
  int64_t i = 0;
  for (; i + 2 * W <= h; i += 2 * W) {
    pair a = load2(x + i), b = load2(x + h + i), c1 = load2(t.c1 + i), s1 = load2(t.s1 + i);
    pair c2 = load2(t.c2 + i), s2 = load2(t.s2 + i);
    store2(out + i, pair{a.a * c1.a - b.a * s1.a, a.b * c1.b - b.b * s1.b});
    store2(out + h + i, b * c2 + a * s2);
  }
  for (; i + W <= h; i += W) {
    vf a = load(x + i), b = load(x + h + i);
    store(out + i, a * load(t.c1 + i) - b * load(t.s1 + i));
    store(out + h + i, b * load(t.c2 + i) + a * load(t.s2 + i));
  }
  for (; i < h; ++i) {
    float a = to_float(x[i]), b = to_float(x[h + i]);
    out[i] = From<T>::of(a * t.c1[i] - b * t.s1[i]);
    out[h + i] = From<T>::of(b * t.c2[i] + a * t.s2[i]);
  }
}

typedef uint64_t vl __attribute__((vector_size(4 * LZ_LANES)));
typedef uint32_t vp __attribute__((vector_size(2 * LZ_LANES)));

LZ_INLINE vf load_swapped(const float* p) {
  vl v;
  memcpy(&v, p, sizeof v);
  return bit_cast<vf>((v << 32) | (v >> 32));
}
LZ_INLINE vf load_swapped(const f16* p) {
  vp v;
  memcpy(&v, p, sizeof v);
  return widen(bit_cast<vh>((v << 16) | (v >> 16)), f16{});
}

// Interleaved pairs lie side by side, and so do their rows of the tables: x·c + swapped(x)·s.
template <class T> LZ_INLINE void turn_pairs(const T* x, T* out, int64_t rotary, const float* c, const float* s) {
  int64_t i = 0;
  for (; i + W <= rotary; i += W) store(out + i, load(x + i) * load(c + i) + load_swapped(x + i) * load(s + i));
  for (; i < rotary; i += 2) {
    float a = to_float(x[i]), b = to_float(x[i + 1]);
    out[i] = From<T>::of(a * c[i] + b * s[i]);
    out[i + 1] = From<T>::of(b * c[i + 1] + a * s[i + 1]);
  }
}

// With bfloat16 a vector comes as two, of the even and of the odd places: the firsts and the seconds of the pairs.
LZ_INLINE void turn_even_odd(const bf16* x, bf16* out, int64_t h, Turn t) {
  int64_t i = 0;
  for (; i + W <= h; i += W) {
    pair x_ = load2(x + 2 * i);
    vf first = x_.a * load(t.c1 + i) - x_.b * load(t.s1 + i);
    store2(out + 2 * i, pair{first, x_.b * load(t.c2 + i) + x_.a * load(t.s2 + i)});
  }
  for (; i < h; ++i) {
    float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    out[2 * i] = From<bf16>::of(a * t.c1[i] - b * t.s1[i]);
    out[2 * i + 1] = From<bf16>::of(b * t.c2[i] + a * t.s2[i]);
  }
}

struct Problem {
  int64_t batch, seq, dim, rotary, table_rows, table_batch, table_row;
  int seq_axis;
  bool interleaved, full, backward;
  Tensor cos, sin, ids;

  LZ_INLINE int64_t id(int64_t b, int64_t s) const {
    if (!ids) return s;
    int64_t at = s * ids.step(-1) + (ids.ndim == 2 && ids.size(0) > 1 ? b * ids.step(0) : 0);
    int64_t found = ids.dtype == I64 ? ids.as<int64_t>()[at] : ids.as<int32_t>()[at];
    return found < 0 ? found + table_rows : found;
  }
  LZ_INLINE int64_t row(int64_t b, int64_t s) const { return b * table_batch + id(b, s) * table_row; }
};

// How the rows of the tables are laid out for a kernel, [c1][s1][c2][s2] of rotary / 2 numbers each:
//   PLAIN   by pair;
//   MIXED   by pair, in the order of pairs of vectors of bfloat16;
//   BESIDE  [c][s] of `rotary` numbers each, as interleaved pairs lie.
enum Order { PLAIN, MIXED, BESIDE };

LZ_INLINE Order order_of(bool interleaved, DType dtype) {
  if (dtype == BF16) return interleaved ? PLAIN : MIXED;
  return interleaved ? BESIDE : PLAIN;
}

template <class T> struct Turned {
  static LZ_INLINE void interleaved(const T* x, T* out, int64_t h, const float* row, bool) {
    turn_pairs(x, out, 2 * h, row, row + 2 * h);
  }
};
LZ_INLINE Turn turn_of(const float* row, int64_t h, bool both) {
  return Turn{row, row + h, both ? row + 2 * h : row, both ? row + 3 * h : row + h};
}
template <> struct Turned<bf16> {
  static LZ_INLINE void interleaved(const bf16* x, bf16* out, int64_t h, const float* row, bool both) {
    turn_even_odd(x, out, h, turn_of(row, h, both));
  }
};

// Tokens [s0, s1) of sequence b of one tensor, whose tables are ready in `rows`: [token][4][rotary / 2].
template <class T>
LZ_INLINE void turn_block(const Problem& p, const Tensor& x, const Tensor& out, int64_t b, int64_t s0, int64_t s1, const float* rows) {
  int head_axis = 3 - p.seq_axis;
  int64_t heads = x.size(head_axis), h = p.rotary / 2;
  bool copied = x.data != out.data && p.rotary < p.dim;
  auto one = [&](int64_t head, int64_t s) __attribute__((always_inline)) {
    const T* from = x.as<T>() + b * x.stride[0] + head * x.stride[head_axis] + s * x.stride[p.seq_axis];
    T* to = out.as<T>() + b * out.stride[0] + head * out.stride[head_axis] + s * out.stride[p.seq_axis];
    const float* row = rows + (s - s0) * 4 * h;
    if (p.interleaved) Turned<T>::interleaved(from, to, h, row, p.full);
    else turn_halves(from, to, h, turn_of(row, h, p.full));
    if (copied) memcpy(to + p.rotary, from + p.rotary, size_t(p.dim - p.rotary) * sizeof(T));
  };
  if (p.seq_axis == 2) {  // heads outside: a head's tokens lie side by side, the next head's far away
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t s = s0; s < s1; ++s) {
        if (head + 1 < heads) {
          const T* from = x.as<T>() + b * x.stride[0] + (head + 1) * x.stride[1] + s * x.stride[2];
          T* to = out.as<T>() + b * out.stride[0] + (head + 1) * out.stride[1] + s * out.stride[2];
          for (int64_t i = 0; i < p.dim; i += 2 * W) fetch2(from + i), claim2(to + i);
        }
        one(head, s);
      }
  } else {
    for (int64_t s = s0; s < s1; ++s)
      for (int64_t head = 0; head < heads; ++head) one(head, s);
  }
}

void tensor_block(const Problem& p, const Tensor& x, const Tensor& out, int64_t b, int64_t s0, int64_t s1, const float* rows) {
  if (x.dtype == F32) turn_block<float>(p, x, out, b, s0, s1, rows);
  else if (x.dtype == BF16) turn_block<bf16>(p, x, out, b, s0, s1, rows);
  else turn_block<f16>(p, x, out, b, s0, s1, rows);
}

// One token's row. Turning back is turning with the tables transposed: s1 and s2 change places and signs.
// A pair's two angles lie `other` numbers apart in the tables, and pairs `step`.
template <class U>
LZ_INLINE void table_row(const U* cos, const U* sin, int64_t h, int64_t step, int64_t other, bool back, Order order, float* row) {
  if (order == BESIDE) {
    for (int64_t i = 0; i < h; ++i) {
      float first = to_float(sin[step * i]), second = to_float(sin[step * i + other]);
      row[2 * i] = to_float(cos[step * i]), row[2 * i + 1] = to_float(cos[step * i + other]);
      row[2 * h + 2 * i] = back ? second : -first, row[2 * h + 2 * i + 1] = back ? -first : second;
    }
    return;
  }
  const U* s1 = back ? sin + other : sin;
  const U* s2 = back ? sin : sin + other;
  auto fill = [&](const U* from, bool minus, float* to) __attribute__((always_inline)) {
    if (order == MIXED) PairOrder<bf16>::widen(from, h, to);
    else
      for (int64_t i = 0; i < h; ++i) to[i] = tamed(to_float(from[step * i]));
    if (minus)
      for (int64_t i = 0; i < h; ++i) to[i] = -to[i];
  };
  fill(cos, false, row), fill(s1, back, row + h);
  if (other) fill(cos + other, false, row + 2 * h), fill(s2, back, row + 3 * h);
}

template <class U> LZ_INLINE void table_rows(const Problem& p, Order order, int64_t b, int64_t s0, int64_t s1, float* rows) {
  int64_t h = p.rotary / 2;
  for (int64_t s = s0; s < s1; ++s) {
    const U *cos = p.cos.as<U>() + p.row(b, s), *sin = p.sin.as<U>() + p.row(b, s);
    float* row = rows + (s - s0) * 4 * h;
    if (!p.full) table_row(cos, sin, h, 1, 0, p.backward, order, row);
    else if (p.interleaved) table_row(cos, sin, h, 2, 1, p.backward, order, row);
    else table_row(cos, sin, h, 1, h, p.backward, order, row);
  }
}

void tables(const Problem& p, Order order, int64_t b, int64_t s0, int64_t s1, float* rows) {
  if (p.cos.dtype == F32) table_rows<float>(p, order, b, s0, s1, rows);
  else if (p.cos.dtype == BF16) table_rows<bf16>(p, order, b, s0, s1, rows);
  else table_rows<f16>(p, order, b, s0, s1, rows);
}

Status check_tensor(const Tensor& x, const Tensor& out, const Problem& p) {
  if (x.ndim != 4 || !x.same_shape(out) || x.dtype != out.dtype) return "out must be as its tensor, of rank 4";
  if (x.dtype != F32 && x.dtype != BF16 && x.dtype != F16) return "dtype must be float32, bfloat16 or float16";
  if (x.size(0) != p.batch || x.size(p.seq_axis) != p.seq || x.size(3) != p.dim) return "q and k must fit together";
  return x.count() == 0 || (x.dense_rows() && out.dense_rows()) ? nullptr : RELAYOUT;
}

// rope(q, k or None, cos, sin, position ids or None, out q, out k or None, interleaved, axis of tokens, backward)
Status rope(Call& c) {
  const Tensor &q = c.t(0), &k = c.t(1), &out_q = c.t(5), &out_k = c.t(6);
  Problem p;
  p.cos = c.t(2), p.sin = c.t(3), p.ids = c.t(4);
  p.interleaved = c.i(7), p.seq_axis = int(c.i(8)), p.backward = c.i(9);
  if (q.ndim != 4 || (p.seq_axis != 1 && p.seq_axis != 2)) return "q must be [B, H, S, D] or [B, S, H, D]";
  p.batch = q.size(0), p.seq = q.size(p.seq_axis), p.dim = q.size(3);
  if (Status why = check_tensor(q, out_q, p)) return why;
  if (bool(k) != bool(out_k)) return "k and its result come together";
  if (k)
    if (Status why = check_tensor(k, out_k, p)) return why;
  const Tensor &cos = p.cos, &sin = p.sin, &ids = p.ids;
  if ((cos.ndim != 2 && cos.ndim != 3) || !cos.same_shape(sin) || cos.dtype != sin.dtype) return "cos and sin must be alike";
  if (cos.count() != 0 && (!cos.dense_rows() || !sin.dense_rows())) return RELAYOUT;
  for (int i = 0; i < cos.ndim; ++i)
    if (cos.count() != 0 && cos.size(i) > 1 && cos.stride[i] != sin.stride[i]) return RELAYOUT;
  p.full = cos.ndim == 3;
  p.rotary = p.full ? cos.size(-1) : 2 * cos.size(-1);
  if (p.rotary > p.dim || p.rotary % 2) return "the tables are too wide";
  if (p.full && cos.size(0) != 1 && cos.size(0) != p.batch) return "the tables are for another batch";
  p.table_rows = cos.size(-2);
  p.table_row = cos.step(-2);
  p.table_batch = p.full && cos.size(0) > 1 ? cos.stride[0] : 0;
  if (ids) {
    if ((ids.dtype != I64 && ids.dtype != I32) || ids.ndim < 1 || ids.ndim > 2 || ids.size(-1) != p.seq ||
        (ids.ndim == 2 && ids.size(0) != 1 && ids.size(0) != p.batch))
      return "position ids must be integers [S] or [B, S]";
    int64_t many = ids.ndim == 2 ? ids.size(0) : 1;
    for (int64_t b = 0; b < many; ++b)
      for (int64_t s = 0; s < p.seq; ++s) {
        int64_t at = p.id(b, s);
        if (at < 0 || at >= p.table_rows) return "a position lies outside the tables";
      }
  } else if (p.seq > p.table_rows) {
    return "the tables are too short";
  }
  if (p.batch == 0 || p.seq == 0 || p.dim == 0) return nullptr;
  int64_t blocks = (p.seq + BLOCK - 1) / BLOCK, width = p.rotary / 2;
  int64_t heads = q.size(3 - p.seq_axis) + (k ? k.size(3 - p.seq_axis) : 0);
  int64_t each = BLOCK * heads * p.dim, grain = each > 0 ? (16 << 10) / each + 1 : 1;
  Order of_q = order_of(p.interleaved, q.dtype), of_k = k ? order_of(p.interleaved, k.dtype) : of_q;
  const char* volatile failed = nullptr;
  parallel_range(p.batch * blocks, grain, c.threads, [&](int64_t begin, int64_t end) {
    float* rows = static_cast<float*>(scratch(size_t(BLOCK * 4 * width + 16) * 4));
    if (rows == nullptr) {
      failed = "out of memory";
      return;
    }
    for (int64_t item = begin; item < end; ++item) {
      int64_t b = item / blocks, s0 = item % blocks * BLOCK, s1 = s0 + BLOCK < p.seq ? s0 + BLOCK : p.seq;
      tables(p, of_q, b, s0, s1, rows);
      tensor_block(p, q, out_q, b, s0, s1, rows);
      if (k && of_k != of_q) tables(p, of_k, b, s0, s1, rows);
      if (k) tensor_block(p, k, out_k, b, s0, s1, rows);
    }
  });
  return failed;
}

Status rope_checked(Call& c) {
  DType t = c.t(2).dtype;
  if (t != F32 && t != BF16 && t != F16) return "tables must be float32, bfloat16 or float16";
  return rope(c);
}

}  // namespace

LZ_EXPORTS(rope) = {
    {"rope", "TOTTOTOiii", &rope_checked},
    {nullptr, nullptr, nullptr},
};

LZ_END
