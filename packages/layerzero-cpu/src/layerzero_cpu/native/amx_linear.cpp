// unit: amx
// Linear layers of bf16 on tiles. The weight is the first operand, read as it lies; x, small, is turned into pairs once for
// all threads. Up to four rows the plain kernel is as quick: the weight's memory decides.
#include "amx.hpp"

namespace lz {
namespace avx512 {
extern const Kernel gemm_linear_exports[];  // for all that tiles are not for
}
}  // namespace lz

LZ_BEGIN

constexpr int COLUMNS = 32;

// Rows of x in blocks of 16, K in steps of 32: tile (block, step) is 16 x 16 words.
struct PairedRows {
  uint32_t* data;
  int64_t blocks, steps;
  const uint32_t* tile(int64_t block, int64_t step) const { return data + (block * steps + step) * 256; }
};

static void pair_rows(const Tensor& x, const RowMap& x_at, int64_t rows, int64_t k, const PairedRows& to, int64_t block) {
  const int some = int(rows - block * 16 < 16 ? rows - block * 16 : 16);
  uint32_t edge[16][16];
  for (int64_t step = 0; step < to.steps; ++step) {
    const int64_t from = step * 32, left = k - from;
    const uint32_t* at[16];
    for (int i = 0; i < some; ++i) {
      const bf16* row = x.as<bf16>() + x_at(block * 16 + i) + from;
      at[i] = reinterpret_cast<const uint32_t*>(row);
      if (left < 32) {
        memset(edge[i], 0, 64);
        memcpy(edge[i], row, size_t(left) * 2);
        at[i] = edge[i];
      }
    }
    turn_words(at, some, 16, to.data + (block * to.steps + step) * 256);
  }
}

// 32 columns times 16 or 32 rows, over all of K. c[row][column].
template <int R>
static void tiles(const bf16* w, int64_t w_step, int cols, int64_t k, const PairedRows& x, int64_t block, float* c) {
  alignas(64) bf16 edge[COLUMNS * 32];
  alignas(64) float out[4][256];
  _tile_zero(0);
  _tile_zero(1);
  if (R == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < x.steps; ++step) {
    const int64_t left = k - step * 32;
    const bf16* a = w + step * 32;
    int64_t a_step = w_step;
    if (left < 32 || cols < COLUMNS) {  // never read behind a row or behind the last one
      memset(edge, 0, sizeof edge);
      for (int i = 0; i < cols; ++i) memcpy(edge + i * 32, a + i * w_step, size_t(left < 32 ? left : 32) * 2);
      a = edge, a_step = 32;
    } else {
      for (int i = 0; i < COLUMNS; ++i) __builtin_prefetch(a + i * w_step + 512);
    }
    _tile_loadd(4, a, a_step * 2);
    _tile_loadd(5, a + 16 * a_step, a_step * 2);
    _tile_loadd(6, x.tile(block, step), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (R == 2) {
      _tile_loadd(7, x.tile(block + 1, step), 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out[0], 64);
  _tile_stored(1, out[1], 64);
  if (R == 2) {
    _tile_stored(2, out[2], 64);
    _tile_stored(3, out[3], 64);
  }
  for (int r = 0; r < R; ++r) {
    for (int half = 0; half < 2; ++half) {
      const uint32_t* at[16];
      uint32_t turned[256];
      for (int i = 0; i < 16; ++i) at[i] = reinterpret_cast<const uint32_t*>(out[2 * r + half]) + i * 16;
      turn_words(at, 16, 16, turned);
      for (int m = 0; m < 16; ++m) memcpy(c + (r * 16 + m) * COLUMNS + half * 16, turned + m * 16, 64);
    }
  }
}

static Status linear(Call& call) {
  const Tensor &x = call.t(0), &w = call.t(1), &bias = call.t(2), &out = call.t(3);
  if (x.dtype != BF16 || w.dtype != BF16 || w.ndim != 2 || x.rows() <= 4) return avx512::gemm_linear_exports[0].run(call);
  if (Status wrong = check_linear(x, w.size(1), w.size(0), bias, out, call.i(4))) return wrong;
  if (!readable(w)) return RELAYOUT;
  const int64_t rows = x.rows(), n = w.size(0), k = w.size(1);
  if (rows == 0 || n == 0) return nullptr;
  PairedRows paired = {nullptr, (rows + 15) / 16, (k + 31) / 32};
  paired.data = static_cast<uint32_t*>(malloc(size_t(paired.blocks * paired.steps) * 1024 + 64));
  if (!paired.data) return "no memory for the rows";
  const RowMap x_at(x), out_at(out);
  parallel_parts(paired.blocks, call.threads, [&](int64_t block) { pair_rows(x, x_at, rows, k, paired, block); });
  const Finish finish = {bias, call.i(4)};
  parallel_parts((n + COLUMNS - 1) / COLUMNS, call.threads, [&](int64_t part) {
    const TileSetup setup;
    alignas(64) float c[32 * COLUMNS];
    const int64_t at = part * COLUMNS;
    const int cols = int(n - at < COLUMNS ? n - at : COLUMNS);
    const bf16* from = w.as<bf16>() + at * w.step(0);
    for (int64_t block = 0; block < paired.blocks; block += 2) {
      if (block + 1 < paired.blocks) tiles<2>(from, w.step(0), cols, k, paired, block, c);
      else tiles<1>(from, w.step(0), cols, k, paired, block, c);
      const int64_t some = rows - block * 16 < 32 ? rows - block * 16 : 32;
      for (int64_t m = 0; m < some; ++m)
        finish.store_row(c + m * COLUMNS, at, cols, out.as<bf16>() + out_at(block * 16 + m) + at);
    }
  });
  free(paired.data);
  return nullptr;
}

LZ_EXPORTS(amx_linear) = {{"linear", "TTOTi", &linear}, {nullptr, nullptr, nullptr}};

LZ_END
