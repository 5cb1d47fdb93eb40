// Products of few rows of x with a weight on tiles, 32 columns of the weight at a time. The weight is the first operand: 256
// numbers of each of its 32 rows are brought, as bf16, to where a tile finds its lines side by side (a panel, 16 KB), and
// used by all rows of x; meanwhile the next panel is filled, line by line between the products. Codes become bf16 without
// error, so what a panel adds is scaled afterwards, in float. x, the second operand, is turned into pairs once for all
// threads; a fp16 goes in as two bf16 that add up to it.
#pragma once
#include "amx.hpp"

namespace lz {
namespace LZ_ISA {

constexpr int PANEL_TILE = 1024, PANEL_STEPS = 8, PANEL_WIDTH = 32, PANEL_BLOCKS = 8;

template <class T> struct Terms { static constexpr int COUNT = 1; };
template <> struct Terms<f16> { static constexpr int COUNT = 2; };

// Rows of x in blocks of 16, K in steps of 32: tile (block, step, term) is 16 x 16 words. Aligned; freed at the end.
struct PairedRows {
  int64_t blocks, steps, terms;
  void* memory;
  char* data;

  PairedRows(int64_t rows, int64_t k, int64_t count) : blocks((rows + 15) / 16), steps((k + 31) / 32), terms(count) {
    memory = malloc(size_t(blocks * steps * terms) * PANEL_TILE + 64);
    data = static_cast<char*>(memory) + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
  }
  PairedRows(char* room, int64_t rows, int64_t k, int64_t count) : blocks((rows + 15) / 16), steps((k + 31) / 32), terms(count), memory(nullptr) {
    data = room + (64 - reinterpret_cast<uintptr_t>(room) % 64) % 64;
  }
  ~PairedRows() { free(memory); }
  PairedRows(const PairedRows&) = delete;
  PairedRows& operator=(const PairedRows&) = delete;
  const char* tile(int64_t block, int64_t step) const { return data + (block * steps + step) * terms * PANEL_TILE; }
  char* place(int64_t block, int64_t step, int64_t term) const { return data + ((block * steps + step) * terms + term) * PANEL_TILE; }

  // One block of rows. Rows behind the last one are zero, as is what lies behind K.
  template <class T> void fill(const Tensor& x, const RowMap& x_at, int64_t rows, int64_t k, int64_t block) const {
    constexpr int N = Terms<T>::COUNT;
    const int some = int(rows - block * 16 < 16 ? rows - block * 16 : 16);
    alignas(64) bf16 line[N][16][32];
    const uint32_t* at[N][16];
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t left = k - step * 32, n = left < 32 ? left : 32;
      for (int i = 0; i < some; ++i) {
        const T* row = x.as<T>() + x_at(block * 16 + i) + step * 32;
        for (int t = 0; t < N; ++t) at[t][i] = reinterpret_cast<const uint32_t*>(line[t][i]);
        if constexpr (N == 1) {
          if (n == 32) {
            at[0][i] = reinterpret_cast<const uint32_t*>(row);
          } else {
            memset(line[0][i], 0, 64);
            memcpy(line[0][i], row, size_t(n) * 2);
          }
        } else {
          split<N>(row, n, i, line);
        }
      }
      for (int t = 0; t < N; ++t) turn_words(at[t], some, 16, reinterpret_cast<uint32_t*>(place(block, step, t)));
    }
  }
  // Cut after eight bits, again and again: what is left over is exact.
  template <int N, class T> static void split(const T* row, int64_t n, int i, bf16 (*line)[16][32]) {
    for (int64_t j = 0; j < 32; ++j) {
      float rest = j < n ? to_float(row[j]) : 0.0f;
      for (int t = 0; t < N; ++t) {
        const uint32_t bits = bit_cast<uint32_t>(rest), quiet = rest != rest ? 0x400000u : 0u;
        const float head = bit_cast<float>((bits | quiet) & 0xffff0000u);
        line[t][i][j].bits = uint16_t((bits | quiet) >> 16);
        rest = head - head == 0.0f ? rest - head : 0.0f;  // nothing is left of an infinity or a NaN
      }
    }
  }
};

// The weight of one group of PANEL_WIDTH columns. `line` writes 32 numbers of a column as bf16; `scaled` says what the sums
// of a panel are multiplied by.
struct PanelScales {
  alignas(64) float scale[PANEL_WIDTH], zero[PANEL_WIDTH];
  const float* sums;  // of the rows of x over this panel, blocks of 16 side by side; null: no zero points
};

// c[row tile][column tile] of R row tiles over `steps` steps of a panel; between the steps, `other(step)`.
template <int R, class F>
LZ_INLINE void panel_tiles(const char* panel, const PairedRows& x, int64_t block, int64_t from, int steps, float* c, const F& other) {
  settled();
  _tile_zero(0);
  _tile_zero(1);
  if (R == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int s = 0; s < steps; ++s) {
    const char *a = panel + s * PANEL_TILE, *b = x.tile(block, from + s), *b2 = R == 2 ? x.tile(block + 1, from + s) : b;
    for (int64_t t = 0; t < x.terms; ++t) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b + t * PANEL_TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a + PANEL_STEPS * PANEL_TILE, 64);
      _tile_dpbf16ps(1, 5, 6);
      if (R == 2) {
        _tile_loadd(7, b2 + t * PANEL_TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    other(s);
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 256, 64);
  if (R == 2) {
    _tile_stored(2, c + 512, 64);
    _tile_stored(3, c + 768, 64);
  }
}

// total += scale * (c - zero * sums), for some row tiles of 2 x 16 columns each.
LZ_INLINE void panel_add(const float* c, int tiles, const PanelScales& by, int64_t block, float* total) {
  for (int r = 0; r < tiles; ++r) {
    const vf sums = by.sums ? load(by.sums + (block + r) * 16) : splat(0.0f);
    for (int i = 0; i < PANEL_WIDTH; ++i, c += 16, total += 16) {
      vf v = load(c);
      if (by.sums) v = v - by.zero[i] * sums;
      store(total, fma(v, splat(by.scale[i]), load(total)));
    }
  }
}

// total[block][32][16] of `tiles` blocks of rows from `first` on and columns at … at+cols; tiles are set up. Weight:
// `line(column, step, to)`, `scales(columns, panel, by)`, and `steps`, the steps of one panel.
template <class Weight>
static void panel_sums(const Weight& weight, const PairedRows& x, int64_t first, int tiles, int64_t at, int cols, float* total) {
  alignas(64) char panel[2][2 * PANEL_STEPS * PANEL_TILE];
  alignas(64) float c[2][1024];
  if (cols < PANEL_WIDTH) memset(panel, 0, sizeof panel);
  PanelScales by[2];
  auto fill = [&](int64_t step, int s, char* to) __attribute__((always_inline)) {
    for (int i = 0; i < cols; ++i) weight.line(at + i, step, to + (i / 16 * PANEL_STEPS + s) * PANEL_TILE + i % 16 * 64);
  };
  memset(total, 0, size_t(tiles) * 2048);
  auto steps_at = [&](int64_t from) { return int(x.steps - from < weight.steps ? x.steps - from : weight.steps); };
  if (x.steps > 0)
    for (int s = 0; s < steps_at(0); ++s) fill(s, s, panel[0]);
  // What a panel gave is added while the next products run: a vector load right behind a tile store would wait for it.
  int waiting = 0, turn = 0, spot = 0;
  int64_t waiting_block = 0;
  const PanelScales* waiting_by = nullptr;
  for (int64_t from = 0; from < x.steps; from += weight.steps, turn ^= 1) {
    const int steps = steps_at(from), coming = from + weight.steps < x.steps ? steps_at(from + weight.steps) : 0;
    char* next = panel[turn ^ 1];
    for (int r = 0; r < tiles; r += 2, spot ^= 1) {
      const int64_t block = first + r;
      auto other = [&](int s) __attribute__((always_inline)) {
        if (r == 0 && s < coming) fill(from + weight.steps + s, s, next);
      };
      if (r + 1 < tiles) panel_tiles<2>(panel[turn], x, block, from, steps, c[spot], other);
      else panel_tiles<1>(panel[turn], x, block, from, steps, c[spot], other);
      if (r == 0)
        for (int s = steps; s < coming; ++s) fill(from + weight.steps + s, s, next);
      if (waiting) panel_add(c[spot ^ 1], waiting, *waiting_by, waiting_block, total + (waiting_block - first) * 512);
      if (r == 0) weight.scales(at, cols, from, by[turn]);
      waiting = r + 1 < tiles ? 2 : 1, waiting_block = block, waiting_by = &by[turn];
    }
  }
  if (waiting) panel_add(c[spot ^ 1], waiting, *waiting_by, waiting_block, total + (waiting_block - first) * 512);
}

// One block of sums, [32][16], turned: lines[16][32].
LZ_INLINE void panel_lines(const float* total, float* lines) {
  alignas(64) float turned[256];
  for (int half = 0; half < 2; ++half) {
    const uint32_t* from[16];
    for (int i = 0; i < 16; ++i) from[i] = reinterpret_cast<const uint32_t*>(total + half * 256 + i * 16);
    turn_words(from, 16, 16, reinterpret_cast<uint32_t*>(turned));
    for (int m = 0; m < 16; ++m) memcpy(lines + m * PANEL_WIDTH + half * 16, turned + m * 16, 64);
  }
}

// All of it.
template <class T, class Weight>
static void panel_product(const Weight& weight, const PairedRows& x, int64_t rows, int64_t n, const Tensor& bias, int64_t act,
                          const Tensor& out, int threads) {
  const RowMap out_at(out);
  const Finish finish = {bias, act};
  parallel_parts((n + PANEL_WIDTH - 1) / PANEL_WIDTH, threads, [&](int64_t part) {
    const TileSetup setup;
    alignas(64) float total[PANEL_BLOCKS * 512], line[16 * PANEL_WIDTH];
    const int64_t at = part * PANEL_WIDTH;
    const int cols = int(n - at < PANEL_WIDTH ? n - at : PANEL_WIDTH);
    for (int64_t first = 0; first < x.blocks; first += PANEL_BLOCKS) {
      const int tiles = int(x.blocks - first < PANEL_BLOCKS ? x.blocks - first : PANEL_BLOCKS);
      panel_sums(weight, x, first, tiles, at, cols, total);
      for (int r = 0; r < tiles; ++r) {
        panel_lines(total + r * 512, line);
        const int64_t row = (first + r) * 16;
        for (int64_t m = 0; m < 16 && row + m < rows; ++m)
          finish.store_row(line + m * PANEL_WIDTH, at, cols, out.as<T>() + out_at(row + m) + at);
      }
    }
  });
}

}  // namespace LZ_ISA
}  // namespace lz
