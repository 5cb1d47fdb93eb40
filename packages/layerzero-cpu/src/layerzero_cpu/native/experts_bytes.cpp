// unit: dotprod avx512_bf16
// Experts with INT8 and INT4 weights by dot products of bytes. Every row is written in digits, or kept as floats, by itself.
#include "experts_codes.hpp"
#include "gemm_bytes.hpp"

LZ_BEGIN

// The room of a row begins with how it is written: 2 or 3 digits, 0: as floats.
struct ByteCodes {
  ExpertCodes w;
  DType dtype;  // of x: how exact the sums must be
  char* data;
  int64_t each;
  Digits plan;

  static constexpr int64_t HEAD = 64;
  static constexpr bool STRAIGHT = false;
  float* straight(int64_t) const { return nullptr; }
  void measure() {
    w.with(0, 1, [&](const Quantized& q) {
      plan = digits_for(q);
      const int64_t wide = int64_t(WideRows::bytes(q)), digits = plan.block ? int64_t(plan.bytes()) : 0;
      each = (HEAD + (wide > digits ? wide : digits) + 127) / 64 * 64;
    });
  }
  size_t bytes(int64_t rows) { return measure(), size_t(rows * each); }
  void place(char* room, int64_t) { data = room + (64 - reinterpret_cast<uintptr_t>(room) % 64) % 64; }
  template <class U> void fill(int64_t row, const U* from) const {
    char* room = data + row * each;
    Digits x = plan;
    x.count = plan.block ? digits_of(plan.crest(from, w.k), dtype) : 0;
    memcpy(room, &x.count, sizeof x.count);
    if (x.count == 0) {
      w.with(0, 1, [&](const Quantized& q) { WideRows(q, room + HEAD).fill(q, 0, from); });
      return;
    }
    x.place(room + HEAD);
    x.fill(0, from, w.k);
    if (!x.offset) return;
    if (x.count == 2) lanes_of<2>(x);
    else lanes_of<3>(x);
  }
  template <int ND> static void lanes_of(const Digits& x) {
#if !defined(__aarch64__)
    if (x.width == 64) return fill_lanes<ND, 64>(x, 0);
    if (x.width == 32) return fill_lanes<ND, 32>(x, 0);
#endif
    fill_lanes<ND, 16>(x, 0);
  }
  template <int ND, int V> static void columns(const Quantized& q, const Digits& x, int64_t at, int cols, float* c) {
    for (int j = 0; j < cols; ++j) {
      if (q.bits == 4) c[j] = q.zero ? dot_column<ND, V, 4, true>(q, x, 0, at + j) : dot_column<ND, V, 4, false>(q, x, 0, at + j);
      else c[j] = q.zero ? dot_column<ND, V, 8, true>(q, x, 0, at + j) : dot_column<ND, V, 8, false>(q, x, 0, at + j);
    }
  }
  template <int ND> static void dots(const Quantized& q, const Digits& x, int64_t at, int cols, float* c) {
#if !defined(__aarch64__)
    if (x.width == 64) return columns<ND, 64>(q, x, at, cols, c);
    if (x.width == 32) return columns<ND, 32>(q, x, at, cols, c);
#endif
    columns<ND, 16>(q, x, at, cols, c);
  }
  void strip(int64_t expert, int64_t row, int count, int64_t at, int cols, float* c) const {
    w.with(expert, 1, [&](const Quantized& q) {
      for (int m = 0; m < count; ++m, c += STRIP) {  // the codes of a strip stay in the cache from row to row
        char* room = data + (row + m) * each;
        Digits x = plan;
        memcpy(&x.count, room, sizeof x.count);
        if (x.count == 0) {
          const WideRows wide(q, room + HEAD);
          for (int j = 0; j < cols; j += 4) quant_rows<1>(q, wide, 0, at + j, cols - j, c + j);
          continue;
        }
        x.place(room + HEAD);
        if (x.count == 2) dots<2>(q, x, at, cols, c);
        else dots<3>(q, x, at, cols, c);
      }
    });
  }
};

static Status moe_quantized(Call& call) {
  return with_expert_codes(call, [&](const Experts& e, const ExpertCodes& gate_up, const ExpertCodes& down) -> Status {
    ByteCodes in = {gate_up, e.x.dtype, nullptr, 0, {}}, back = {down, e.x.dtype, nullptr, 0, {}};
    LZ_FLOATS(e.x.dtype, return all_experts<T>(e, in, back, 1, call.threads));
    return "x must be float32, bfloat16 or float16";
  });
}

LZ_EXPORTS(experts_bytes) = {{"moe_quantized", EXPERT_CODES_SIGNATURE, &moe_quantized}, {nullptr, nullptr, nullptr}};

LZ_END
