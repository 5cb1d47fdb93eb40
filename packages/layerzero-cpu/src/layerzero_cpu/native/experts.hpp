// A mixture of experts: tokens sorted by expert, gate and up of each in one visit of the weight with the activation applied to
// the sums, then down, then the weighted sum of each token's results in the order of its slots. Everything is float until then.
// What a product is made of (plain weights, codes as floats, codes as bytes) is a class `P` with
//   bytes(rows), place(room, rows)     memory for that many rows of its operand
//   STRAIGHT, straight(row)            whether floats of a row may be written at once, and where; else they come through fill
//   fill(row, from)                    one row; from null: zeros
//   strip(expert, row, count, at, cols, c)   c[m][STRIP] = rows times columns at … at+cols of the expert's weight, count <= MOST
// Work is cut into an expert's rows times STRIP columns; a part's result depends on nothing else in the call.
#pragma once
#include <stdlib.h>

#include "gemm_finish.hpp"

namespace lz {
namespace LZ_ISA {

constexpr int STRIP = 32;    // columns of a part
constexpr int MOST = 128;    // rows that share a visit of the weight
constexpr int64_t SWIGLUOAI = ACTIVATIONS;
constexpr int64_t CHUNK_BYTES = 256 << 20;  // what the rows of the tokens that are done at a time may take

LZ_INLINE float float_at(const Tensor& t, int64_t at) {
  return t.dtype == F32 ? t.as<float>()[at] : t.dtype == BF16 ? to_float(t.as<bf16>()[at]) : to_float(t.as<f16>()[at]);
}

struct Experts {
  const Tensor &x, &shares, &ids, &gate_up_bias, &down_bias, &out;
  int64_t experts, hidden, inner, act, offset;  // hidden: columns of out
  float alpha, limit;
  bool gated, interleaved;

  int64_t tokens() const { return ids.size(0); }
  int64_t top_k() const { return ids.size(1); }
  int64_t expert_of(int64_t token, int64_t place) const {  // -1: none of these
    const int64_t at = token * ids.step(0) + place * ids.step(1);
    const int64_t id = ids.dtype == I64 ? ids.as<int64_t>()[at] : int64_t(ids.as<int32_t>()[at]);
    return id >= offset && id - offset < experts ? id - offset : -1;
  }
  // The biases of gate and up for inner column j of an expert.
  int64_t gate_row(int64_t j) const { return interleaved ? 2 * j : j; }
  int64_t up_row(int64_t j) const { return interleaved ? 2 * j + 1 : inner + j; }
  float bias_at(int64_t expert, int64_t row) const {
    return gate_up_bias ? float_at(gate_up_bias, expert * gate_up_bias.step(0) + row * gate_up_bias.step(1)) : 0.0f;
  }
  LZ_INLINE vf gate_of(vf gate, vf up) const {  // comparisons are false for NaN, which stays
    gate = select(gate > splat(limit), splat(limit), gate);
    up = select(up > splat(limit), splat(limit), select(up < splat(-limit), splat(-limit), up));
    if (act == SWIGLUOAI) return gate / (1.0f + vexp(gate * -alpha)) * (up + 1.0f);
    return activate(gate, act) * up;
  }
  // to[at … at+cols) from the sums of two strips of the weight: gate and up, or (interleaved) pairs of both.
  void finish_gate(int64_t expert, int64_t at, int cols, float* c, float* d, float* to) const {
    if (gated && interleaved) {
      alignas(64) float pairs[2 * STRIP];
      memcpy(pairs, c, STRIP * sizeof(float)), memcpy(pairs + STRIP, d, STRIP * sizeof(float));
      for (int j = 0; j < STRIP; ++j) c[j] = pairs[2 * j], d[j] = pairs[2 * j + 1];
    }
    if (gate_up_bias) {
      for (int j = 0; j < cols; ++j) c[j] += bias_at(expert, gated ? gate_row(at + j) : at + j);
      for (int j = 0; gated && j < cols; ++j) d[j] += bias_at(expert, up_row(at + j));
    }
    for (int j = 0; j < cols; j += W) {
      const vf value = gated ? gate_of(load(c + j), load(d + j)) : activate(load(c + j), act);
      if (cols - j >= W) store(to + at + j, value);
      else store_part(to + at + j, value, cols - j);
    }
  }
};

// The slots of some tokens sorted by expert: row r of the sorted ones is slot slot[r] (-1: a row of zeros, which fills an
// expert's rows up to a multiple of `fill`), row_of is the way back (-1: of no expert here).
struct Sorted {
  struct Item {
    int64_t expert, begin, count;
    // Rows that share a visit of the weight: at most MOST, about as many in each, and whole panels and tiles of them.
    int64_t visit() const {
      const int64_t visits = (count + MOST - 1) / MOST;
      return ((count + visits - 1) / visits + 15) / 16 * 16;
    }
  };
  int64_t *slot, *row_of;
  Item* items;
  int64_t rows, used;  // rows of all items, and how many items there are

  static size_t bytes(int64_t slots, int64_t experts, int64_t fill) {
    const int64_t most = experts < slots ? experts : slots;
    return size_t(slots + slots + most * fill + experts + 1) * 8 + size_t(most) * sizeof(Item);
  }
  void make(const Experts& e, int64_t first, int64_t last, int64_t fill, void* room) {
    const int64_t k = e.top_k(), slots = (last - first) * k, most = e.experts < slots ? e.experts : slots;
    row_of = static_cast<int64_t*>(room);
    slot = row_of + slots;
    int64_t* next = slot + slots + most * fill;  // where the next slot of an expert goes
    items = reinterpret_cast<Item*>(next + e.experts + 1);
    for (int64_t i = 0; i <= e.experts; ++i) next[i] = 0;
    for (int64_t i = 0; i < slots; ++i) {
      row_of[i] = e.expert_of(first + i / k, i % k);
      if (row_of[i] >= 0) ++next[row_of[i]];
    }
    rows = used = 0;
    for (int64_t i = 0; i < e.experts; ++i) {
      const int64_t count = next[i], whole = (count + fill - 1) / fill * fill;
      next[i] = rows;
      if (count) items[used++] = {i, rows, whole};
      for (int64_t r = rows + count; r < rows + whole; ++r) slot[r] = -1;
      rows += whole;
    }
    for (int64_t i = 0; i < slots; ++i)
      if (row_of[i] >= 0) slot[next[row_of[i]]] = i, row_of[i] = next[row_of[i]]++;
  }
};

// Tokens first … last. `fill`: rows of an expert come in multiples of it.
template <class T, class P>
static Status experts_of(const Experts& e, P& in, P& back, int64_t first, int64_t last, int64_t fill, int threads) {
  const int64_t k = e.top_k(), slots = (last - first) * k;
  void* index = malloc(Sorted::bytes(slots, e.experts, fill));
  if (!index) return "no memory for the slots";
  Sorted s;
  s.make(e, first, last, fill, index);
  const int64_t rows = s.rows, wide = padded(e.inner), held = P::STRAIGHT ? 0 : rows * wide;
  char* room = static_cast<char*>(malloc(in.bytes(rows) + back.bytes(rows) + size_t(rows * e.hidden + held) * sizeof(float) + 256));
  if (!room) {
    free(index);
    return "no memory for the rows";
  }
  float* results = reinterpret_cast<float*>(room + (64 - reinterpret_cast<uintptr_t>(room) % 64) % 64);
  float* middle = results + rows * e.hidden;
  char* rest = reinterpret_cast<char*>(middle + held);
  in.place(rest, rows);
  back.place(rest + in.bytes(rows), rows);
  const T* x = e.x.as<T>();
  const int64_t step = e.x.step(0);
  const int64_t each = 1 + (1 << 15) / (e.hidden + 1);  // rows of a part: enough that a second thread is worth its start
  parallel_parts((rows + each - 1) / each, threads, [&](int64_t part) {
    for (int64_t r = part * each; r < rows && r < (part + 1) * each; ++r)
      in.fill(r, s.slot[r] < 0 ? static_cast<const T*>(nullptr) : x + (first + s.slot[r] / k) * step);
  });
  const int64_t strips = (e.inner + STRIP - 1) / STRIP;
  parallel_parts(s.used * strips, threads, [&](int64_t part) {
    alignas(64) float c[MOST * STRIP], d[MOST * STRIP];
    const Sorted::Item& item = s.items[part / strips];
    const int64_t at = part % strips * STRIP;
    const int cols = int(e.inner - at < STRIP ? e.inner - at : STRIP);
    for (int64_t row = item.begin, end = row + item.count, each = item.visit(); row < end; row += each) {
      const int some = int(end - row < each ? end - row : each);
      if (e.gated && e.interleaved) {
        in.strip(item.expert, row, some, 2 * at, 2 * cols < STRIP ? 2 * cols : STRIP, c);
        if (2 * cols > STRIP) in.strip(item.expert, row, some, 2 * at + STRIP, 2 * cols - STRIP, d);
      } else {
        in.strip(item.expert, row, some, at, cols, c);
        if (e.gated) in.strip(item.expert, row, some, e.inner + at, cols, d);
      }
      for (int m = 0; m < some; ++m) {
        float* to = P::STRAIGHT ? back.straight(row + m) : middle + (row + m) * wide;
        e.finish_gate(item.expert, at, cols, c + m * STRIP, d + m * STRIP, to);
        for (int64_t j = e.inner; at + cols == e.inner && j < wide; ++j) to[j] = 0.0f;
      }
    }
  });
  if (!P::STRAIGHT)
    parallel_parts((rows + each - 1) / each, threads, [&](int64_t part) {
      for (int64_t r = part * each; r < rows && r < (part + 1) * each; ++r) back.fill(r, middle + r * wide);
    });
  const int64_t columns = (e.hidden + STRIP - 1) / STRIP;
  parallel_parts(s.used * columns, threads, [&](int64_t part) {
    alignas(64) float c[MOST * STRIP];
    const Sorted::Item& item = s.items[part / columns];
    const int64_t at = part % columns * STRIP;
    const int cols = int(e.hidden - at < STRIP ? e.hidden - at : STRIP);
    for (int64_t row = item.begin, end = row + item.count, each = item.visit(); row < end; row += each) {
      const int some = int(end - row < each ? end - row : each);
      back.strip(item.expert, row, some, at, cols, c);
      for (int m = 0; m < some; ++m) {
        float* to = results + (row + m) * e.hidden + at;
        memcpy(to, c + m * STRIP, size_t(cols) * sizeof(float));
        for (int j = 0; e.down_bias && j < cols; ++j) to[j] += float_at(e.down_bias, item.expert * e.down_bias.step(0) + (at + j) * e.down_bias.step(1));
      }
    }
  });
  parallel_range(last - first, each, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* to = e.out.as<T>() + (first + t) * e.out.step(0);
      for (int64_t at = 0; at < e.hidden; at += W) {
        const int64_t left = e.hidden - at;
        vf sum = splat(0.0f);
        for (int64_t place = 0; place < k; ++place) {
          const int64_t row = s.row_of[t * k + place];
          if (row < 0) continue;
          const float* from = results + row * e.hidden + at;
          const float share = float_at(e.shares, (first + t) * e.shares.step(0) + place * e.shares.step(1));
          sum = fma(left >= W ? load(from) : load_part(from, left), splat(share), sum);
        }
        if (left >= W) store(to + at, sum);
        else store_part(to + at, sum, left);
      }
    }
  });
  free(room);
  free(index);
  return nullptr;
}

// All tokens, so many at a time that their rows keep to CHUNK_BYTES.
template <class T, class P> static Status all_experts(const Experts& e, P& in, P& back, int64_t fill, int threads) {
  const int64_t tokens = e.tokens(), each = e.top_k() * 4 * (2 * e.hidden + 2 * e.inner + 64);
  int64_t chunk = CHUNK_BYTES / each;
  if (chunk < MOST) chunk = MOST;
  const int64_t chunks = (tokens + chunk - 1) / chunk;
  for (int64_t i = 0; i < chunks; ++i)
    if (Status wrong = experts_of<T>(e, in, back, tokens * i / chunks, tokens * (i + 1) / chunks, fill, threads)) return wrong;
  return nullptr;
}

// `rows` and `width` of gate_up.
inline Status check_experts(const Experts& e, int64_t rows, int64_t width) {
  const Tensor &x = e.x, &out = e.out, &ids = e.ids, &shares = e.shares;
  if (x.ndim != 2 || out.ndim != 2 || out.size(0) != x.size(0) || out.dtype != x.dtype || x.size(1) != width || out.size(1) != e.hidden)
    return "x must be [T, K] and out [T, H], of one dtype";
  if (ids.ndim != 2 || ids.size(0) != x.size(0) || (ids.dtype != I64 && ids.dtype != I32)) return "ids must be int32 or int64, [T, k]";
  if (!shares.same_shape(ids) || (shares.dtype != F32 && shares.dtype != BF16 && shares.dtype != F16)) return "weights must be floating, [T, k]";
  if (rows != e.inner && rows != 2 * e.inner) return "gate_up must have as many rows as down has columns, or twice as many";
  const Tensor* biases[] = {&e.gate_up_bias, &e.down_bias};
  for (const Tensor* b : biases)
    if (*b && (b->ndim != 2 || b->size(0) != e.experts || b->size(1) != (b == &e.down_bias ? e.hidden : rows) ||
               (b->dtype != F32 && b->dtype != BF16 && b->dtype != F16)))
      return "biases must be floating, [E, rows]";
  if (e.act < SILU || e.act > SWIGLUOAI || (e.act == SWIGLUOAI && !e.gated)) return "unknown activation";
  return readable(x) && readable(out) ? nullptr : RELAYOUT;
}

}  // namespace LZ_ISA
}  // namespace lz
