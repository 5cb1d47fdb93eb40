// Linear layers of a few dozen rows: a strip of the weight is turned and converted, block by block, into a panel that stays
// in the first cache while all rows are multiplied with it. Turning costs as much as about ten rows; what the rows before the
// next block do hides the way of its weights from memory. A sum runs over k in blocks, the same for any strip and thread.
#pragma once
#include "gemm_finish.hpp"
#include "turn.hpp"

namespace lz {
namespace LZ_ISA {

#if LZ_LANES != 16 || defined(LZ_ISA_portable)
constexpr int PACKED_FROM = 0;  // never
#else
constexpr int PACKED_FROM = 28;  // rows; fewer are done before the panel has paid
constexpr int PACKED_K = 128, PACKED_COLS = 64, PACKED_ROWS = 6, PACKED_MOST = 128;

// panel[k][width] from `cols` columns of the weight; zeros beside them and behind `length`.
template <class T> inline void pack_panel(const T* w, int64_t w_step, int cols, int width, int64_t length, float* panel) {
  for (int64_t at = 0; at < length; at += W) {
    for (int j = 0; j < width; j += W) {
      __m512i r[W];
      for (int i = 0; i < W; ++i) {
        const T* from = w + (j + i) * w_step + at;
        if (j + i >= cols) r[i] = _mm512_setzero_si512();
        else r[i] = bit_cast<__m512i>(length - at >= W ? load(from) : load_edge(from, length - at));
      }
      turn(r, [&](int i, __m512i row) { store(panel + (at + i) * width + j, bit_cast<vf>(row)); });
    }
  }
}

// c[R][C vectors] += a[R][k] * panel[k][C vectors], k a multiple of 8; `next`, where there is one: lines of the columns that
// come next, one column's PACKED_K elements for every eight steps.
template <int R, int C, class T>
LZ_INLINE void packed_rows(const float* a, int64_t a_step, const float* panel, float* c, int64_t k, const T* next, int64_t w_step) {
  constexpr int LINE = 64 / sizeof(T), LINES = PACKED_K / LINE;
  vf s[R][C];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) s[r][i] = splat(0.0f);
  for (int64_t at = 0; at < k; at += 8) {
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u) {
      if (next && u < LINES) __builtin_prefetch(next + u * LINE, 0, 2);
      vf x[C];
      for (int i = 0; i < C; ++i) x[i] = load(panel + (at + u) * C * W + i * W);
      for (int r = 0; r < R; ++r) {
        const vf y = splat(a[r * a_step + at + u]);
        for (int i = 0; i < C; ++i) s[r][i] = fma(x[i], y, s[r][i]);
      }
    }
    if (next) next += w_step;
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(c + (r * C + i) * W, load(c + (r * C + i) * W) + s[r][i]);
}

// x [rows, k] as floats, k padded with zeros to a multiple of W, times `cols` columns of the weight; c is [rows][C vectors].
template <int C, class T>
inline void packed_strip(const float* x, int64_t x_step, int64_t rows, const T* w, int64_t w_step, int cols, bool more, int64_t k,
                         float* c) {
  alignas(64) float panel[PACKED_K * C * W];
  memset(c, 0, size_t(rows) * C * W * sizeof(float));
  for (int64_t from = 0; from < k; from += PACKED_K) {
    const int64_t length = k - from < PACKED_K ? k - from : PACKED_K, whole = padded(length);
    pack_panel(w + from, w_step, cols, C * W, length, panel);
    // What is wanted next: the same columns further on, or the first elements of the columns that follow.
    const T* next = from + 2 * PACKED_K <= k ? w + from + PACKED_K : more ? w + C * W * w_step : nullptr;
    const float* a = x + from;
    int64_t m = 0, asked = 0;
    for (; m + PACKED_ROWS <= rows; m += PACKED_ROWS) {
      const bool ask = next && asked < C * W && cols == C * W && whole == PACKED_K;
      if (ask) packed_rows<PACKED_ROWS, C>(a + m * x_step, x_step, panel, c + m * C * W, whole, next + asked * w_step, w_step);
      else packed_rows<PACKED_ROWS, C, T>(a + m * x_step, x_step, panel, c + m * C * W, whole, nullptr, 0);
      asked += PACKED_K / 8;
    }
    if (m + 4 <= rows) packed_rows<4, C, T>(a + m * x_step, x_step, panel, c + m * C * W, whole, nullptr, 0), m += 4;
    if (m + 2 <= rows) packed_rows<2, C, T>(a + m * x_step, x_step, panel, c + m * C * W, whole, nullptr, 0), m += 2;
    if (m < rows) packed_rows<1, C, T>(a + m * x_step, x_step, panel, c + m * C * W, whole, nullptr, 0);
  }
}

template <int C, class T>
inline void packed_linear(const float* x, int64_t x_step, const Tensor& w, int64_t rows, const Finish& finish, const Tensor& out,
                          int threads) {
  const RowMap out_at(out);
  const int64_t n = w.size(0), k = w.size(1), w_step = w.step(0);
  constexpr int WIDTH = C * W;
  parallel_parts((n + WIDTH - 1) / WIDTH, threads, [&](int64_t part) {
    alignas(64) float c[PACKED_MOST * WIDTH];
    const int64_t at = part * WIDTH;
    const int cols = int(n - at < WIDTH ? n - at : WIDTH);
    for (int64_t row = 0; row < rows; row += PACKED_MOST) {
      const int64_t some = rows - row < PACKED_MOST ? rows - row : PACKED_MOST;
      packed_strip<C>(x + row * x_step, x_step, some, w.as<T>() + at * w_step, w_step, cols, at + 2 * WIDTH <= n, k, c);
      for (int64_t m = 0; m < some; ++m) finish.store_row(c + m * WIDTH, at, cols, out.as<T>() + out_at(row + m) + at);
    }
  });
}

// Narrower strips where a layer has few columns, so that every thread has some.
template <class T>
inline void packed_product(const float* x, int64_t x_step, const Tensor& w, int64_t rows, const Finish& finish, const Tensor& out,
                           int threads) {
  const int64_t n = w.size(0);
  if (n >= 4 * PACKED_COLS * threads) packed_linear<4, T>(x, x_step, w, rows, finish, out, threads);
  else if (n >= PACKED_COLS * threads) packed_linear<2, T>(x, x_step, w, rows, finish, out, threads);
  else packed_linear<1, T>(x, x_step, w, rows, finish, out, threads);
}
#endif

}  // namespace LZ_ISA
}  // namespace lz
