// Tiles of the AMX unit: 16 rows of 64 bytes. c (16 x 16 float) += a (16 x 32 bf16) * b, where b holds pairs: word (p, j) of
// b is the pair b[2p][j], b[2p+1][j]. Each part of a parallel loop sets the tiles up and gives them back.
#pragma once
#include "gemm_finish.hpp"

namespace lz {
namespace LZ_ISA {

// Everything written so far is in memory as far as the compiler is concerned: gcc's own intrinsics do not say that a tile
// load, or the load of a configuration, reads what vector code has just stored.
LZ_INLINE void settled() { __asm__ volatile("" ::: "memory"); }

struct TileSetup {
  alignas(64) uint8_t bytes[64] = {};
  TileSetup() {
    bytes[0] = 1;
    for (int t = 0; t < 8; ++t) {
      bytes[16 + 2 * t] = 64;  // bytes of a row
      bytes[48 + t] = 16;      // rows
    }
    settled();
    _tile_loadconfig(bytes);
  }
  ~TileSetup() { _tile_release(); }
  TileSetup(const TileSetup&) = delete;
  TileSetup& operator=(const TileSetup&) = delete;
};

// 16 rows of up to 16 words each, `step` words apart, turned: to[word][row]. Words from `words` and rows from `rows` on are 0.
LZ_INLINE void turn_words(const uint32_t* const* rows_at, int rows, int words, uint32_t* to) {
  __m512i r[16], t[16];
  const __mmask16 mask = __mmask16((1u << words) - 1u);
  for (int i = 0; i < 16; ++i) r[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, rows_at[i]) : _mm512_setzero_si512();
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
    _mm512_storeu_si512(to + (0 + c) * 16, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(to + (8 + c) * 16, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_storeu_si512(to + (4 + c) * 16, _mm512_shuffle_i32x4(low2, high2, 0x88));
    _mm512_storeu_si512(to + (12 + c) * 16, _mm512_shuffle_i32x4(low2, high2, 0xdd));
  }
}

}  // namespace LZ_ISA
}  // namespace lz
