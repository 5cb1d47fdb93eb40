// Rows times a weight [N, K] that is read as it lies and converted in registers: the product of few rows.
#pragma once
#include "gemm_packed.hpp"

namespace lz {
namespace LZ_ISA {

constexpr int COLUMNS = 32;    // columns of one part
constexpr int MOST_ROWS = 128; // rows that share a visit of the weight

template <class T> struct Linear {
  const float* x;
  int64_t x_step;
  const T* w;
  int64_t w_step;

  // c[m][j] += x[m][from … from+k) · w[at+j][…) for `rows` rows and columns at … at+cols.
  void add(int64_t row, int rows, int64_t at, int cols, int64_t from, int64_t length, float* c) const {
    if (rows == 1) {
      int j = 0;
      if constexpr (LZ_LANES == 16 && sizeof(T) == 4 && LZ_TWO_AHEAD > 0) {
        const float* from_x = x + row * x_step + from;
        for (; j + 2 <= cols; j += 2) {
          const T* b = w + (at + j) * w_step + from;
          dot2(from_x, b, b + w_step, length, c + j, c + j + 1);
        }
      }
      for (; j < cols; ++j) c[j] += dot1(x + row * x_step + from, w + (at + j) * w_step + from, length);
      return;
    }
    for (int j = 0; j < cols; j += 4) {
      const T* b[4];
      for (int i = 0; i < 4; ++i) b[i] = w + (at + (j + i < cols ? j + i : cols - 1)) * w_step + from;
      v4 out[4];
      int m = 0;
      const int64_t next = 4 * w_step;  // the four columns that follow
      for (; m + DOT_ROWS <= rows; m += DOT_ROWS) {
        dot4<DOT_ROWS>(x + (row + m) * x_step + from, x_step, b[0], b[1], b[2], b[3], length, out, m ? 0 : next);
        for (int i = 0; i < DOT_ROWS; ++i) add4(c + (m + i) * COLUMNS + j, out[i]);
      }
      for (; m + 2 <= rows; m += 2) {
        dot4<2>(x + (row + m) * x_step + from, x_step, b[0], b[1], b[2], b[3], length, out, m ? 0 : next);
        add4(c + m * COLUMNS + j, out[0]), add4(c + (m + 1) * COLUMNS + j, out[1]);
      }
      if (m < rows) {
        dot4<1>(x + (row + m) * x_step + from, x_step, b[0], b[1], b[2], b[3], length, out, m ? 0 : next);
        add4(c + m * COLUMNS + j, out[0]);
      }
    }
  }
  static LZ_INLINE void add4(float* c, v4 v) {
    v4 old;
    memcpy(&old, c, 16);
    old = old + v;
    memcpy(c, &old, 16);
  }
};

}  // namespace LZ_ISA
}  // namespace lz
