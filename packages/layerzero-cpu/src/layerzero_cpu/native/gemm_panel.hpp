// c[m][n] += sum over k of a[m][k] * b[k][n], all float: the product inside prefill attention, where b (a tile of keys,
// transposed, or of values) is packed once and used by many rows. n is a multiple of W, as is the room behind each row.
#pragma once
#include "vec.hpp"

namespace lz {
namespace LZ_ISA {

#if LZ_LANES == 16
constexpr int PANEL_ROWS = 6, PANEL_COLS = 4;
#elif LZ_LANES == 8 || !defined(__aarch64__)
constexpr int PANEL_ROWS = 4, PANEL_COLS = 2;
#else
constexpr int PANEL_ROWS = 8, PANEL_COLS = 2;
#endif

// R rows, C vectors of columns; k a multiple of 4.
template <int R, int C>
LZ_INLINE void panel(const float* a, int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_step, int64_t k, bool fresh) {
  vf s[R][C];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) s[r][i] = fresh ? splat(0.0f) : load(c + r * c_step + i * W);
#if LZ_LANES == 4 && defined(__aarch64__) && !defined(LZ_ISA_portable)
  for (int64_t at = 0; at < k; at += 4) {  // the same as below; without intrinsics gcc takes the lanes through general registers
    float32x4_t y[R];
    for (int r = 0; r < R; ++r) y[r] = vld1q_f32(a + r * a_step + at);
#define LZ_LANE(u)                                                                                                     \
  {                                                                                                                    \
    float32x4_t x[C];                                                                                                  \
    for (int i = 0; i < C; ++i) x[i] = vld1q_f32(b + (at + u) * b_step + i * W);                                       \
    for (int r = 0; r < R; ++r)                                                                                        \
      for (int i = 0; i < C; ++i) s[r][i] = bit_cast<vf>(vfmaq_laneq_f32(bit_cast<float32x4_t>(s[r][i]), x[i], y[r], u)); \
  }
    LZ_LANE(0) LZ_LANE(1) LZ_LANE(2) LZ_LANE(3)
#undef LZ_LANE
  }
#elif LZ_LANES == 4
  for (int64_t at = 0; at < k; at += 4) {  // four steps share one load of each row of a
    vf y[R];
    for (int r = 0; r < R; ++r) y[r] = load(a + r * a_step + at);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      vf x[C];
      for (int i = 0; i < C; ++i) x[i] = load(b + (at + u) * b_step + i * W);
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < C; ++i) s[r][i] = fma(x[i], splat(y[r][u]), s[r][i]);
    }
  }
#else
  for (int64_t at = 0; at < k; ++at) {
    vf x[C];
    for (int i = 0; i < C; ++i) x[i] = load(b + at * b_step + i * W);
    for (int r = 0; r < R; ++r) {
      vf y = splat(a[r * a_step + at]);
      for (int i = 0; i < C; ++i) s[r][i] = fma(x[i], y, s[r][i]);
    }
  }
#endif
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(c + r * c_step + i * W, s[r][i]);
}

template <int R>
LZ_INLINE void panel_rows(const float* a, int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_step, int64_t n,
                          int64_t k, bool fresh) {
  int64_t at = 0;
  for (; at + PANEL_COLS * W <= n; at += PANEL_COLS * W) panel<R, PANEL_COLS>(a, a_step, b + at, b_step, c + at, c_step, k, fresh);
  if (PANEL_COLS == 4 && at + 3 * W <= n) panel<R, 3>(a, a_step, b + at, b_step, c + at, c_step, k, fresh), at += 3 * W;
  if (PANEL_COLS == 4 && at + 2 * W <= n) panel<R, 2>(a, a_step, b + at, b_step, c + at, c_step, k, fresh), at += 2 * W;
  for (; at < n; at += W) panel<R, 1>(a, a_step, b + at, b_step, c + at, c_step, k, fresh);
}

inline void multiply(const float* a, int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_step, int64_t m, int64_t n,
                     int64_t k, bool fresh) {
  int64_t r = 0;
  for (; r + PANEL_ROWS <= m; r += PANEL_ROWS)
    panel_rows<PANEL_ROWS>(a + r * a_step, a_step, b, b_step, c + r * c_step, c_step, n, k, fresh);
  for (; r + 2 <= m; r += 2) panel_rows<2>(a + r * a_step, a_step, b, b_step, c + r * c_step, c_step, n, k, fresh);
  if (r < m) panel_rows<1>(a + r * a_step, a_step, b, b_step, c + r * c_step, c_step, n, k, fresh);
}

}  // namespace LZ_ISA
}  // namespace lz
