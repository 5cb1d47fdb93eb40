// Experts with INT8 and INT4 weights: what the units with and without dot products of bytes share.
#pragma once
#include "experts.hpp"
#include "gemm_quant.hpp"

namespace lz {
namespace LZ_ISA {

static_assert(STRIP == QUANT_COLS, "the sums of a strip lie as those of linear");

// The codes [E, N, K] of all experts with their scales: [], or [E, N, blocks].
struct ExpertCodes {
  const Tensor &codes, &scale, &zero;
  int64_t bits, block, n, k;

  static Tensor part(const Tensor& t, int64_t expert) {
    if (t.ndim != 3) return t;
    return {t.data + expert * t.step(0) * size_of(t.dtype), t.shape + 1, t.stride + 1, 2, t.dtype};
  }
  template <class F> LZ_INLINE void with(int64_t expert, int64_t rows, const F& f) const {
    const Tensor none = {nullptr, nullptr, nullptr, 0, NONE}, c = part(codes, expert), s = part(scale, expert), z = part(zero, expert);
    const int64_t each = block ? block : k > 0 ? k : 1;
    f(Quantized{none, c, s, z, none, none, 0, bits, each, rows, n, k, (k + each - 1) / each});
  }
  Status check() const {
    if (bits != 4 && bits != 8) return "codes have 4 or 8 bits";
    if (codes.ndim != 3 || codes.dtype != (bits == 8 ? I8 : U8)) return "codes must be int8 [E, N, K], or uint8 [E, N, K/2] for 4 bits";
    if (block < 0 || (block > 0 && k % block) || (block > 0 && bits == 4 && block % 2)) return "the block must divide K, and be even for 4 bits";
    if (!scale) return "scales are missing";
    const Tensor* both[] = {&scale, &zero};
    for (const Tensor* t : both) {
      if (!*t) continue;
      if (t->dtype != (t == &zero ? I32 : F32)) return "scales must be float32 and zero points int32";
      const bool fits = t->ndim == 3 && t->size(0) == codes.size(0) && t->size(1) == n && t->size(2) == (block ? k / block : 1);
      if (t->ndim != 0 && !fits) return "scales and zero points must be [], or [E, N, blocks]";
    }
    return readable(codes) ? nullptr : RELAYOUT;
  }
};

// Codes widened in registers.
struct FloatCodes {
  ExpertCodes w;
  float* data;
  int64_t rows;

  static constexpr bool STRAIGHT = false;
  float* straight(int64_t) const { return nullptr; }
  size_t bytes(int64_t rows) const {
    size_t found = 0;
    w.with(0, rows, [&](const Quantized& q) { found = WideRows::bytes(q); });
    return found;
  }
  void place(char* room, int64_t count) { data = reinterpret_cast<float*>(room), rows = count; }
  template <class U> void fill(int64_t row, const U* from) const {
    w.with(0, rows, [&](const Quantized& q) { WideRows(q, data).fill(q, row, from); });
  }
  void strip(int64_t expert, int64_t row, int count, int64_t at, int cols, float* c) const {
    w.with(expert, rows, [&](const Quantized& q) {
      const WideRows wide(q, data);
      for (int j = 0; j < cols; j += 4) {
        int m = 0;
        for (; m + DOT_ROWS <= count; m += DOT_ROWS) quant_rows<DOT_ROWS>(q, wide, row + m, at + j, cols - j, c + m * STRIP + j);
        for (; m < count; ++m) quant_rows<1>(q, wide, row + m, at + j, cols - j, c + m * STRIP + j);
      }
    });
  }
};

#define EXPERT_CODES_SIGNATURE "TTTOTTOTTOOTiiffiiii"

// x; codes, scale, zero point or None of gate_up and of down; weights, ids, gate_up bias or None, down bias or None, out;
// activation, first id, alpha, limit (inf: none), interleaved, bits of a code, block of gate_up and of down (0: one scale a row)
template <class F> inline Status with_expert_codes(Call& call, const F& run) {
  const Tensor &x = call.t(0), &first = call.t(1), &second = call.t(4);
  const int64_t bits = call.i(17), halves = bits == 4 ? 2 : 1;
  if (first.ndim != 3 || second.ndim != 3) return "codes must be [E, N, K]";
  const ExpertCodes gate_up = {first, call.t(2), call.t(3), bits, call.i(18), first.size(1), first.size(2) * halves};
  const ExpertCodes down = {second, call.t(5), call.t(6), bits, call.i(19), second.size(1), second.size(2) * halves};
  if (Status wrong = gate_up.check()) return wrong;
  if (Status wrong = down.check()) return wrong;
  if (first.size(0) != second.size(0)) return "gate_up and down must hold as many experts";
  const Experts e = {x, call.t(7), call.t(8), call.t(9), call.t(10), call.t(11), second.size(0), down.n, down.k, call.i(12), call.i(13),
                     float(call.f(14)), float(call.f(15)), gate_up.n == 2 * down.k, call.i(16) != 0};
  if (Status wrong = check_experts(e, gate_up.n, gate_up.k)) return wrong;
  return run(e, gate_up, down);
}

}  // namespace LZ_ISA
}  // namespace lz
