// unit: dotprod avx512_vnni
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
    if (x.count == 2) fill_lanes<2>(x, 0);
    else fill_lanes<3>(x, 0);
  }
  void strip(int64_t expert, int64_t row, int count, int64_t at, int cols, float* c) const {
    w.with(expert, 1, [&](const Quantized& q) {
      DigitRow rows[MOST];
      int some = 0, digits = 0;  // rows of one number of digits, which share the codes
      auto flush = [&](int next) {
        if (some && digits == 2) dot_rows<2>(q, plan, rows, some, at, cols, c + (next - some) * STRIP, STRIP);
        else if (some) dot_rows<3>(q, plan, rows, some, at, cols, c + (next - some) * STRIP, STRIP);
        some = 0;
      };
      for (int m = 0; m < count; ++m) {
        char* room = data + (row + m) * each;
        Digits x = plan;
        memcpy(&x.count, room, sizeof x.count);
        if (x.count != digits) flush(m);
        digits = x.count;
        if (digits == 0) {
          const WideRows wide(q, room + HEAD);
          for (int j = 0; j < cols; j += 4) quant_rows<1>(q, wide, 0, at + j, cols - j, c + m * STRIP + j);
          continue;
        }
        x.place(room + HEAD);
        rows[some++] = DigitRow(x, 0);
      }
      flush(count);
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
