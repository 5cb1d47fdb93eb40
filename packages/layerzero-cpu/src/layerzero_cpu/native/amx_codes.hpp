// INT8 and INT4 codes of a weight as the panels of tiles want them.
#pragma once
#include "amx_panel.hpp"
#include "gemm_quant.hpp"

namespace lz {
namespace LZ_ISA {

// 32 codes of a row as bf16. INT8 through float; INT4 by looking up: a byte in each word's lower half and the same byte moved
// by 12 bits leave a code in the last four bits of each half, and a table of twice 16 does not see the bit above.
template <int BITS> struct CodeLine;
template <> struct CodeLine<8> {
  static constexpr int BYTES = 32;
  LZ_INLINE void operator()(const uint8_t* from, char* to) const {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16))));
    _mm512_storeu_si512(to, bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
};
template <> struct CodeLine<4> {
  static constexpr int BYTES = 16;
  __m512i table;
  CodeLine() {
    bf16 of[32];
    for (int i = 0; i < 32; ++i) of[i] = From<bf16>::of(float(i % 16 < 8 ? i % 16 : i % 16 - 16));
    table = _mm512_loadu_si512(of);
  }
  LZ_INLINE void operator()(const uint8_t* from, char* to) const {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(both, table));
  }
};

template <int BITS> struct CodeWeight {
  static constexpr int BYTES = CodeLine<BITS>::BYTES;
  static constexpr int64_t AHEAD = 512;  // bytes from the codes read to those fetched meanwhile
  const Quantized& q;
  const float* sums;  // of x: [block][rows to 16], or null
  int64_t sums_step;
  int steps;
  CodeLine<BITS> widen;

  LZ_INLINE void line(int64_t column, int64_t at, char* to) const {
    const uint8_t* from = q.row(column) + at * BYTES;
    const int64_t left = q.k * BITS / 8 - at * BYTES;
    if (left >= BYTES) {
      if (at * BYTES % 64 == 0) __builtin_prefetch(from + AHEAD, 0, 2);
      widen(from, to);
      return;
    }
    uint8_t edge[BYTES] = {};
    memcpy(edge, from, size_t(left));
    widen(edge, to);
  }
  void scales(int64_t column, int cols, int64_t step, PanelScales& by) const {
    const int64_t block = step * 32 / q.block;
    for (int i = 0; i < PANEL_WIDTH; ++i) {
      by.scale[i] = i < cols ? q.scale_at(column + i, block) : 0.0f;
      by.zero[i] = sums && i < cols ? q.zero_at(column + i, block) : 0.0f;
    }
    // A block may be several panels: its sum is taken off with the first one.
    by.sums = sums && step * 32 % q.block == 0 ? sums + block * sums_step : nullptr;
  }
};

// Steps of a panel: as many as fit a block of the weight evenly; 0: tiles cannot take such blocks.
inline int panel_steps(const Quantized& q) {
  if (q.block >= q.k) return PANEL_STEPS;
  if (q.block % 32) return 0;
  int steps = PANEL_STEPS;
  while (q.block / 32 % steps) --steps;
  return steps;
}

}  // namespace LZ_ISA
}  // namespace lz
