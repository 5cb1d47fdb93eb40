// Sixteen rows of sixteen 32-bit words, turned: row i of the result holds word i of every row.
#pragma once
#include "vec.hpp"

#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
namespace lz {
namespace LZ_ISA {

// `put(i, row)` takes each row of the result, in no order; r is used up.
template <class Put> LZ_INLINE void turn(__m512i (&r)[16], const Put& put) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4i + c] holds, in its four quarters q, words 4q + c of rows 4i … 4i+3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i low2 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), high2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    put(c, _mm512_shuffle_i32x4(low, high, 0x88));
    put(8 + c, _mm512_shuffle_i32x4(low, high, 0xdd));
    put(4 + c, _mm512_shuffle_i32x4(low2, high2, 0x88));
    put(12 + c, _mm512_shuffle_i32x4(low2, high2, 0xdd));
  }
}

}  // namespace LZ_ISA
}  // namespace lz
#endif
