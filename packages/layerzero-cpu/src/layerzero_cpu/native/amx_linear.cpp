// unit: amx
// Linear layers of bf16 on tiles. The weight is the first operand. Up to four rows the plain kernel is as quick: the weight's
// memory decides. Up to 32 rows each line of the weight is used once, and read as it lies; beyond that it is used again and
// again, and goes through a panel: lines of one tile 8 KB apart, as in a weight of 4096 columns, all want the same place in
// the first cache and would be fetched anew for every block of rows.
#include "amx_panel.hpp"

namespace lz {
namespace avx512 {
extern const Kernel gemm_linear_exports[];  // for all that tiles are not for
}
}  // namespace lz

LZ_BEGIN

constexpr int COLUMNS = PANEL_WIDTH, ONE_PASS = 32;
#ifndef LZ_PANEL_AHEAD
#define LZ_PANEL_AHEAD 1024  // bytes from a line of the weight to the one fetched meanwhile, into the second cache
#endif

struct PlainWeight {
  const bf16* w;
  int64_t step, k;
  int steps = PANEL_STEPS;

  LZ_INLINE void line(int64_t column, int64_t at, char* to) const {
    const bf16* from = w + column * step + at * 32;
    const int64_t left = k - at * 32;
    if (left >= 32) {
      _mm512_storeu_si512(to, _mm512_loadu_si512(from));
      __builtin_prefetch(reinterpret_cast<const char*>(from) + LZ_PANEL_AHEAD, 0, 2);
    } else {
      memset(to, 0, 64);
      memcpy(to, from, size_t(left) * 2);
    }
  }
  LZ_INLINE void scales(int64_t, int, int64_t, PanelScales& by) const {
    for (int i = 0; i < PANEL_WIDTH; i += W) store(by.scale + i, splat(1.0f));
    by.sums = nullptr;
  }
};

// 32 columns times 16 or 32 rows, over all of K. c[row][column].
template <int R>
static void tiles(const bf16* w, int64_t w_step, int cols, int64_t k, const PairedRows& x, float* c) {
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
    settled();
    _tile_loadd(4, a, a_step * 2);
    _tile_loadd(5, a + 16 * a_step, a_step * 2);
    _tile_loadd(6, x.tile(0, step), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (R == 2) {
      _tile_loadd(7, x.tile(1, step), 64);
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
  const PairedRows paired(rows, k, 1);
  if (!paired.memory) return "no memory for the rows";
  const RowMap x_at(x), out_at(out);
  parallel_parts(paired.blocks, call.threads, [&](int64_t block) { paired.fill<bf16>(x, x_at, rows, k, block); });
  if (rows > ONE_PASS) {
    panel_product<bf16>(PlainWeight{w.as<bf16>(), w.step(0), k}, paired, rows, n, bias, call.i(4), out, call.threads);
    return nullptr;
  }
  const Finish finish = {bias, call.i(4)};
  parallel_parts((n + COLUMNS - 1) / COLUMNS, call.threads, [&](int64_t part) {
    const TileSetup setup;
    alignas(64) float c[32 * COLUMNS];
    const int64_t at = part * COLUMNS;
    const int cols = int(n - at < COLUMNS ? n - at : COLUMNS);
    const bf16* from = w.as<bf16>() + at * w.step(0);
    if (paired.blocks == 2) tiles<2>(from, w.step(0), cols, k, paired, c);
    else tiles<1>(from, w.step(0), cols, k, paired, c);
    for (int64_t m = 0; m < rows; ++m) finish.store_row(c + m * COLUMNS, at, cols, out.as<bf16>() + out_at(m) + at);
  });
  return nullptr;
}

LZ_EXPORTS(amx_linear) = {{"linear", "TTOTi", &linear}, {nullptr, nullptr, nullptr}};

LZ_END
