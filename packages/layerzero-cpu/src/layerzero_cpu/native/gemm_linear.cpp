// unit: portable neon avx2 avx512
// x [M, K] times weight [N, K] transposed, plus bias, then an activation, for few rows: the weight is read once, as it
// lies, and converted in registers, or (many rows, wide vectors) turned strip by strip. Sums are float; results are the same for any number of threads.
// `linear_fixed` takes one way for any number of rows, so that the bits of a row do not depend on how many there are.
#include "gemm_rows.hpp"

LZ_BEGIN

template <class T>
static Status run(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& out, int64_t act, int threads, bool fixed) {
  const int64_t rows = x.rows(), n = w.size(0), k = w.size(1), step = padded(k);
  if (rows == 0 || n == 0) return nullptr;
  const RowMap x_at(x), out_at(out);
  const Finish finish = {bias, act};
  const bool packed = PACKED_FROM > 0 && (fixed || rows >= PACKED_FROM);
  // The rows as floats, zeros behind them; where they are that already, as they lie.
  const bool ready = packed && sizeof(T) == 4 && step == k && x_at.step > 0;
  // The plain product adds up otherwise for one, two or four rows at a time: with rows of zeros behind, always four.
  const int64_t whole = fixed && !packed ? (rows + DOT_ROWS - 1) / DOT_ROWS * DOT_ROWS : rows;
  float* wide = ready ? nullptr : static_cast<float*>(malloc(size_t(whole * step) * sizeof(float) + 64));
  if (!ready && !wide) return "no memory for the rows";
  if (!ready) {
    const int64_t each = 1 + (1 << 15) / (step + 1);  // rows of a part: enough that a second thread is worth its start
    parallel_parts((rows + each - 1) / each, threads, [&](int64_t part) {
      for (int64_t m = part * each; m < rows && m < (part + 1) * each; ++m) widen_row(x.as<T>() + x_at(m), k, wide + m * step, 1.0f);
    });
  }
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
  if (packed) {
    const float* from = ready ? reinterpret_cast<const float*>(x.as<T>()) : wide;
    packed_product<T>(from, ready ? x_at.step : step, w, rows, finish, out, threads);
    free(wide);
    return nullptr;
  }
#endif
  memset(wide + rows * step, 0, size_t((whole - rows) * step) * sizeof(float));
  const Linear<T> linear = {wide, step, w.as<T>(), w.step(0)};
  const int64_t block = fixed ? 1024 : rows <= 4 ? k : rows <= 16 ? 2048 : 1024;
  // Narrower parts where a layer has few columns, so that every thread has some; a column's sum is the same in any.
  int64_t width = COLUMNS;
  while (width > 4 && n < width * threads * 2) width /= 2;
  parallel_parts((n + width - 1) / width, threads, [&](int64_t part) {
    alignas(64) float c[MOST_ROWS * COLUMNS];
    const int64_t at = part * width;
    const int cols = int(n - at < width ? n - at : width);
    for (int64_t row = 0; row < whole; row += MOST_ROWS) {
      const int some = int(whole - row < MOST_ROWS ? whole - row : MOST_ROWS);
      memset(c, 0, size_t(some) * COLUMNS * sizeof(float));
      for (int64_t from = 0; from < k; from += block)
        linear.add(row, some, at, cols, from, k - from < block ? k - from : block, c);
      for (int m = 0; m < some && row + m < rows; ++m) finish.store_row(c + m * COLUMNS, at, cols, out.as<T>() + out_at(row + m) + at);
    }
  });
  free(wide);
  return nullptr;
}

static Status linear_any(Call& call, bool fixed) {
  const Tensor &x = call.t(0), &w = call.t(1), &bias = call.t(2), &out = call.t(3);
  if (w.ndim != 2 || w.dtype != x.dtype) return "weight must be [N, K] of x's dtype";
  if (Status wrong = check_linear(x, w.size(1), w.size(0), bias, out, call.i(4))) return wrong;
  if (!readable(w)) return RELAYOUT;
  LZ_FLOATS(x.dtype, return run<T>(x, w, bias, out, call.i(4), call.threads, fixed));
  return "linear takes float32, bfloat16 and float16";
}
static Status linear(Call& call) { return linear_any(call, false); }
static Status linear_fixed(Call& call) { return linear_any(call, true); }

LZ_EXPORTS(gemm_linear) = {{"linear", "TTOTi", &linear}, {"linear_fixed", "TTOTi", &linear_fixed}, {nullptr, nullptr, nullptr}};

LZ_END
