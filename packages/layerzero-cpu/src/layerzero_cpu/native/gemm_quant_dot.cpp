// unit: dotprod avx512_vnni
// Linear layers with INT8 and INT4 weights by dot products of bytes. Each block of x becomes whole numbers, written in two
// or three balanced digits to base 256 (14 bits for bf16, 22 bits for the others), so that four products of a digit with a
// code are one instruction and exact; blocks are added in float. Rows with NaN or infinity take the float way.
#include "gemm_bytes.hpp"

LZ_BEGIN

constexpr int TOGETHER = 32;  // rows that share a visit of a part's codes

template <int ND> static void dot_all(const Quantized& q, const Digits& x, int threads) {
  const RowMap out_at(q.out);
  const Finish finish = {q.bias, q.act};
  for (int64_t row = 0; x.offset && row < q.rows; ++row) fill_lanes<ND>(x, row);
  parallel_parts((q.n + QUANT_COLS - 1) / QUANT_COLS, threads, [&](int64_t part) {
    alignas(64) float c[TOGETHER * QUANT_COLS];
    const int64_t at = part * QUANT_COLS;
    const int cols = int(q.n - at < QUANT_COLS ? q.n - at : QUANT_COLS);
    for (int64_t row = 0; row < q.rows; row += TOGETHER) {  // the codes of a part stay in the cache
      const int some = int(q.rows - row < TOGETHER ? q.rows - row : TOGETHER);
      DigitRow rows[TOGETHER];
      for (int m = 0; m < some; ++m) rows[m] = DigitRow(x, row + m);
      dot_rows<ND>(q, x, rows, some, at, cols, c, QUANT_COLS);
      for (int m = 0; m < some; ++m)
        LZ_FLOATS(q.out.dtype, finish.store_row(c + m * QUANT_COLS, at, cols, q.out.as<T>() + out_at(row + m) + at));
    }
  });
}

template <class T> static Status run(const Quantized& q, int threads) {
  Digits x = digits_for(q);
  if (x.block == 0) return quantized_in_float<T>(q, threads);
  const RowMap x_at(q.x);
  float crest = 0.0f;
  for (int64_t m = 0; m < q.rows; ++m) {
    const float here = x.crest(q.x.as<T>() + x_at(m), q.k);
    if (here > crest) crest = here;
  }
  x.count = digits_of(crest, q.x.dtype);
  if (x.count == 0) return quantized_in_float<T>(q, threads);
  void* room = malloc(x.bytes());
  if (!room) return "no memory for the rows";
  x.place(static_cast<char*>(room));
  for (int64_t m = 0; m < q.rows; ++m) x.fill(m, q.x.as<T>() + x_at(m), q.k);
  if (x.count == 3) dot_all<3>(q, x, threads);
  else dot_all<2>(q, x, threads);
  free(room);
  return nullptr;
}

static Status linear_quantized(Call& call) {
  return with_quantized(call, [&](const Quantized& q) -> Status {
    LZ_FLOATS(q.x.dtype, return run<T>(q, call.threads));
    return "x must be float32, bfloat16 or float16";
  });
}

LZ_EXPORTS(gemm_quant_dot) = {{"linear_quantized", QUANTIZED_SIGNATURE, &linear_quantized}, {nullptr, nullptr, nullptr}};

LZ_END
