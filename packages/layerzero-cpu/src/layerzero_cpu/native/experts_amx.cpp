// unit: amx
// Experts with INT8 and INT4 weights on tiles: codes become bf16, without error, once for all rows of an expert, and sums are
// scaled block by block in float. Few rows, and what tiles cannot take, go to the dot products of bytes.
#include "amx_codes.hpp"
#include "experts_codes.hpp"

namespace lz {
namespace avx512_vnni {
extern const Kernel experts_bytes_exports[];
}
}  // namespace lz

LZ_BEGIN

static_assert(STRIP == PANEL_WIDTH && MOST == 16 * PANEL_BLOCKS, "the sums of a strip are those of a panel");

// Rows as the tiles read them, `terms` bf16 for a number: an expert's rows come in multiples of 16.
struct TileCodes {
  ExpertCodes w;
  int64_t terms, rows;
  char* room;

  static constexpr bool STRAIGHT = false;
  float* straight(int64_t) const { return nullptr; }
  PairedRows paired() const { return PairedRows(room, rows, w.k, terms); }
  size_t bytes(int64_t count) const { return size_t((count + 15) / 16 * ((w.k + 31) / 32) * terms) * PANEL_TILE + 64; }
  void place(char* memory, int64_t count) { room = memory, rows = count; }
  template <class U> void fill(int64_t row, const U* from) const { terms == 1 ? words<1>(row, from) : words<2>(row, from); }
  template <int N, class U> void words(int64_t row, const U* from) const {
    const PairedRows x = paired();
    alignas(64) bf16 line[N][16][32] = {};
    for (int64_t step = 0; step < x.steps; ++step) {
      const int64_t left = w.k - step * 32;
      if (from) PairedRows::split<N>(from + step * 32, left < 32 ? left : 32, 0, line);
      for (int t = 0; t < N; ++t) {
        uint32_t* to = reinterpret_cast<uint32_t*>(x.place(row / 16, step, t)) + row % 16;
        uint32_t pair[16];
        memcpy(pair, line[t][0], sizeof pair);
        for (int p = 0; p < 16; ++p) to[p * 16] = pair[p];
      }
    }
  }
  void strip(int64_t expert, int64_t row, int count, int64_t at, int cols, float* c) const {
    const TileSetup setup;
    const PairedRows x = paired();
    alignas(64) float total[PANEL_BLOCKS * 512];
    const int tiles = count / 16;
    w.with(expert, rows, [&](const Quantized& q) {
      if (q.bits == 8) panel_sums(CodeWeight<8>{q, nullptr, 0, panel_steps(q), {}}, x, row / 16, tiles, at, cols, total);
      else panel_sums(CodeWeight<4>{q, nullptr, 0, panel_steps(q), {}}, x, row / 16, tiles, at, cols, total);
    });
    for (int r = 0; r < tiles; ++r) panel_lines(total + r * 512, c + r * 16 * STRIP);
  }
  // Rows of an expert that are worth its panels: few go quicker to the bytes, unless their blocks are shorter than a vector.
  int64_t worth() const { return w.bits == 4 && w.block && w.block < 128 ? 5 : 12; }
  bool fits() const {
    bool found = !w.zero && w.k > 0;
    w.with(0, 1, [&](const Quantized& q) { found = found && panel_steps(q) > 0; });
    return found;
  }
};

static Status moe_quantized(Call& call) {
  bool fits = true;
  Status found = with_expert_codes(call, [&](const Experts& e, const ExpertCodes& gate_up, const ExpertCodes& down) -> Status {
    TileCodes in = {gate_up, e.x.dtype == BF16 ? 1 : 2, 0, nullptr}, back = {down, 2, 0, nullptr};
    // A tile adds up one number after the other: too coarse for float32, whose results are held to its own precision.
    fits = e.x.dtype != F32 && e.tokens() * e.top_k() >= e.experts * in.worth() && e.experts > 0 && in.fits() && back.fits();
    if (!fits) return nullptr;
    if (e.x.dtype == BF16) return all_experts<bf16>(e, in, back, 16, call.threads);
    return all_experts<f16>(e, in, back, 16, call.threads);
  });
  return fits || found ? found : avx512_vnni::experts_bytes_exports[0].run(call);
}

LZ_EXPORTS(experts_amx) = {{"moe_quantized", EXPERT_CODES_SIGNATURE, &moe_quantized}, {nullptr, nullptr, nullptr}};

LZ_END
