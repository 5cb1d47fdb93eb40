// Tiles of the AMX unit: 16 rows of 64 bytes. c (16 x 16 float) += a (16 x 32 bf16) * b, where b holds pairs: word (p, j) of
// b is the pair b[2p][j], b[2p+1][j]. Each part of a parallel loop sets the tiles up and gives them back.
#pragma once
#include "gemm_finish.hpp"
#include "turn.hpp"

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
  __m512i r[16];
  const __mmask16 mask = __mmask16((1u << words) - 1u);
  for (int i = 0; i < 16; ++i) r[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, rows_at[i]) : _mm512_setzero_si512();
  turn(r, [&](int i, __m512i row) { _mm512_storeu_si512(to + i * 16, row); });
}

}  // namespace LZ_ISA
}  // namespace lz
