// unit: amx
// Prefill attention of bf16 on tiles. As attn_prefill.cpp, but the products run on the AMX unit: queries and weights are
// first operands as they lie, a tile of keys is turned into pairs along head_dim, one of values into pairs of keys. Scores,
// softmax and sums stay float; the weights are rounded to bf16 for the second product, as flash attention does on GPUs.
#include "amx.hpp"
#include "attn.hpp"
#include "attn_entry.hpp"

namespace lz {
namespace avx512 {
extern const Kernel attn_prefill_exports[];  // for float32 and fp16
}
}  // namespace lz

LZ_BEGIN

constexpr int BLOCK_ROWS = 256;

struct Room {
  bf16 *q, *weights;          // [rows][dim], [rows][TILE]
  uint32_t *keys, *values;    // pairs: [dim / 2][TILE], [TILE / 2][dim_v]
  float *scores, *acc;        // [rows][TILE], [rows][dim_v]
  Running* running;
  Band* band;
  int64_t dim, dim_v, rows;   // padded: to 32, 16 and 16
};

static size_t room_bytes(int64_t rows, int64_t dim, int64_t dim_v) {
  return size_t(rows * (dim + TILE) * 2 + dim * TILE * 2 + TILE * dim_v * 2 + rows * (TILE + dim_v) * 4) +
         size_t(rows) * (sizeof(Running) + sizeof(Band)) + 64;
}

static Room cut_room(char* at, int64_t rows, int64_t dim, int64_t dim_v) {
  Room r;
  r.dim = dim, r.dim_v = dim_v, r.rows = rows;
  r.scores = reinterpret_cast<float*>(at);
  r.acc = r.scores + rows * TILE;
  r.keys = reinterpret_cast<uint32_t*>(r.acc + rows * dim_v);
  r.values = r.keys + dim / 2 * TILE;
  r.q = reinterpret_cast<bf16*>(r.values + TILE / 2 * dim_v);
  r.weights = r.q + rows * dim;
  r.band = reinterpret_cast<Band*>(r.weights + rows * TILE);
  r.running = reinterpret_cast<Running*>(r.band + rows);
  return r;
}

// keys[p][j] = elements 2p and 2p+1 of key j.
static void pair_keys(const bf16* const* kp, int n, int64_t dim, const Room& room) {
  uint32_t turned[256], edge[16][16];
  for (int j = 0; j < TILE; j += 16) {
    const int some = n - j < 0 ? 0 : n - j < 16 ? n - j : 16;
    for (int64_t d = 0; d < room.dim; d += 32) {
      const uint32_t* at[16];
      for (int i = 0; i < some; ++i) {
        at[i] = reinterpret_cast<const uint32_t*>(kp[j + i] + d);
        if (dim - d < 32) {
          memset(edge[i], 0, 64);
          memcpy(edge[i], kp[j + i] + d, size_t(dim - d) * 2);
          at[i] = edge[i];
        }
      }
      turn_words(at, some, 16, turned);
      for (int p = 0; p < 16; ++p) memcpy(room.keys + (d / 2 + p) * TILE + j, turned + p * 16, 64);
    }
  }
}

// values[p][c] = column c of values 2p and 2p+1.
static void pair_values(const bf16* const* vp, int n, int64_t dim, const Room& room) {
  for (int p = 0; p < TILE / 2; ++p) {
    for (int64_t c = 0; c < room.dim_v; c += 16) {
      const __mmask16 mask = dim - c >= 16 ? __mmask16(0xffff) : __mmask16((1u << (dim - c)) - 1u);
      const __m256i zero = _mm256_setzero_si256();
      const __m256i a = 2 * p < n ? _mm256_maskz_loadu_epi16(mask, vp[2 * p] + c) : zero;
      const __m256i b = 2 * p + 1 < n ? _mm256_maskz_loadu_epi16(mask, vp[2 * p + 1] + c) : zero;
      const __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
      _mm512_storeu_si512(room.values + p * room.dim_v + c, pairs);
    }
  }
}

// scores[r …+16][TILE] of 16 rows: four tiles side by side.
static LZ_INLINE void score_rows(const Room& room, int64_t r) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < room.dim; d += 32) {
    const uint32_t* k = room.keys + d / 2 * TILE;
    _tile_loadd(4, room.q + r * room.dim + d, room.dim * 2);
    _tile_loadd(5, k, TILE * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, k + 16, TILE * 4);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, k + 32, TILE * 4);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, k + 48, TILE * 4);
    _tile_dpbf16ps(3, 4, 5);
  }
  float* s = room.scores + r * TILE;
  _tile_stored(0, s, TILE * 4);
  _tile_stored(1, s + 16, TILE * 4);
  _tile_stored(2, s + 32, TILE * 4);
  _tile_stored(3, s + 48, TILE * 4);
}

// acc[r …+16][:] += weights[r …+16][TILE] times values.
static LZ_INLINE void weigh_rows(const Room& room, int64_t r) {
  _tile_loadd(4, room.weights + r * TILE, TILE * 2);
  _tile_loadd(5, room.weights + r * TILE + 32, TILE * 2);
  float* acc = room.acc + r * room.dim_v;
  const uint32_t* v = room.values;
  const int64_t half = 16 * room.dim_v;
  int64_t c = 0;
  for (; c + 32 <= room.dim_v; c += 32) {
    _tile_loadd(0, acc + c, room.dim_v * 4);
    _tile_loadd(1, acc + c + 16, room.dim_v * 4);
    _tile_loadd(6, v + c, room.dim_v * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, v + c + 16, room.dim_v * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, v + half + c, room.dim_v * 4);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, v + half + c + 16, room.dim_v * 4);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, acc + c, room.dim_v * 4);
    _tile_stored(1, acc + c + 16, room.dim_v * 4);
  }
  if (c < room.dim_v) {
    _tile_loadd(0, acc + c, room.dim_v * 4);
    _tile_loadd(6, v + c, room.dim_v * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, v + half + c, room.dim_v * 4);
    _tile_dpbf16ps(0, 5, 7);
    _tile_stored(0, acc + c, room.dim_v * 4);
  }
}

// A row that sees its whole tile, without cap, bias or mask: scaled, softened and rounded in registers.
static LZ_INLINE float soften_whole(const float* s, float scale, Running& run, bf16* w) {
  const vf factor = splat(scale);
  vf x[TILE / W];
  for (int i = 0; i < TILE / W; ++i) x[i] = load(s + i * W) * factor;
  vf top = x[0];
  for (int i = 1; i < TILE / W; ++i) top = vmax(x[i], top);  // a NaN is passed over here and kept by e^x
  const float peak = _mm512_reduce_max_ps(bit_cast<__m512>(vmax(top, splat(-INF))));
  const float max = peak > run.max ? peak : run.max;
  const vf base = splat(max == -INF ? 0.0f : max);
  vf total = splat(0.0f);
  for (int i = 0; i < TILE / W; ++i) {
    const vf below = x[i] - base;
    x[i] = select(below < splat(-87.0f), splat(0.0f), exp_normal(below));
    total = total + x[i];
  }
  for (int i = 0; i < TILE / W; i += 2) {
    const __m512bh both = _mm512_cvtne2ps_pbh(bit_cast<__m512>(x[i + 1]), bit_cast<__m512>(x[i]));
    memcpy(w + i * W, &both, 64);
  }
  const float before = max == run.max ? 1.0f : exp_of(run.max - max);
  run.sum = run.sum * before + _mm512_reduce_add_ps(bit_cast<__m512>(total));
  run.max = max;
  return before;
}

static void attend_block(const Problem& p, const Sequence& seq, int64_t kv_head, int64_t from, int64_t to, const Room& room) {
  const TileSetup setup;
  const int rows = int((to - from) * p.group);
  int64_t first = seq.keys, last = 0;
  memset(room.q, 0, size_t(room.rows * room.dim) * sizeof(bf16));
  memset(room.acc, 0, size_t(room.rows * room.dim_v) * sizeof(float));
  memset(room.weights, 0, size_t(room.rows * TILE) * sizeof(bf16));
  for (int r = 0; r < rows; ++r) {
    const int64_t query = from + r / p.group, head = kv_head * p.group + r % p.group;
    memcpy(room.q + r * room.dim, reinterpret_cast<const bf16*>(p.q) + seq.q_at + head * p.q_head + query * p.q_seq, size_t(p.dim) * 2);
    room.band[r] = band_of(p.rules, seq, query);
    if (room.band[r].begin < first) first = room.band[r].begin;
    if (room.band[r].end > last) last = room.band[r].end;
    room.running[r] = {-INF, 0.0f};
  }
  const bool plain = p.rules.softcap == 0.0f && !p.rules.slopes && !p.rules.mask;
  const bf16 *keys[TILE], *values[TILE];
  for (first = first / TILE * TILE; first < last; first += TILE) {
    const int n = int(last - first < TILE ? last - first : TILE);
    p.kv.rows(seq.batch, kv_head, first, n, keys, values);
    int low = 0, high = rows;  // rows are in the order of their queries: only those from low to high see this tile
    while (low < high && (room.band[low].end <= first || room.band[low].begin >= first + n)) ++low;
    while (high > low && (room.band[high - 1].end <= first || room.band[high - 1].begin >= first + n)) --high;
    if (low == high) continue;
    pair_keys(keys, n, p.dim, room);
    pair_values(values, n, p.dim_v, room);
    for (int r = low / 16 * 16; r < high; r += 16) score_rows(room, r);
    for (int r = low / 16 * 16; r < (high + 15) / 16 * 16; ++r) {
      bf16* w = room.weights + r * TILE;
      if (r < low || r >= high) {
        memset(w, 0, TILE * sizeof(bf16));
        continue;
      }
      float* s = room.scores + r * TILE;
      float factor;
      if (plain && room.band[r].begin <= first && room.band[r].end >= first + TILE) {
        factor = soften_whole(s, p.rules.scale, room.running[r], w);
      } else {
        for (int j = 0; j < TILE; j += W) store(s + j, load(s + j) * p.rules.scale);
        finish_scores(s, n, first, p, seq, kv_head * p.group + r % p.group, from + r / p.group, room.band[r]);
        factor = soften(s, TILE, room.running[r]);
        for (int j = 0; j < TILE; j += W) store(w + j, load(s + j));
      }
      float* acc = room.acc + r * room.dim_v;
      if (factor != 1.0f)
        for (int64_t c = 0; c < room.dim_v; c += W) store(acc + c, load(acc + c) * factor);
    }
    for (int r = low / 16 * 16; r < high; r += 16) weigh_rows(room, r);
  }
  for (int r = 0; r < rows; ++r)
    write_row<bf16>(p, seq, kv_head * p.group + r % p.group, from + r / p.group, room.running[r], room.acc + r * room.dim_v);
}

static Status prefill(const Problem& p, DType dtype) {
  if (dtype != BF16) return "attention on tiles takes bfloat16";
  int64_t most = 0;
  for (int64_t b = 0; b < p.sequences; ++b)
    if (p.sequence[b].queries > most) most = p.sequence[b].queries;
  int64_t queries = p.group >= BLOCK_ROWS ? 1 : BLOCK_ROWS / p.group;
  if (queries > most) queries = most;
  const int64_t blocks = (most + queries - 1) / queries, rows = (queries * p.group + 15) / 16 * 16;
  const int64_t dim = (p.dim + 31) / 32 * 32, dim_v = (p.dim_v + 15) / 16 * 16;
  bool failed = false;
  parallel_parts(p.sequences * p.kv_heads * blocks, p.threads, [&](int64_t part) {
    const int64_t block = blocks - 1 - part / (p.sequences * p.kv_heads), group = part % (p.sequences * p.kv_heads);
    const Sequence& seq = p.sequence[group / p.kv_heads];
    const int64_t from = block * queries, to = from + queries < seq.queries ? from + queries : seq.queries;
    if (from >= to) return;
    char* memory = static_cast<char*>(scratch(room_bytes(rows, dim, dim_v)));
    if (!memory) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    attend_block(p, seq, group % p.kv_heads, from, to, cut_room(memory, rows, dim, dim_v));
  });
  return failed ? "no memory for a block of rows" : nullptr;
}

static Status attention_prefill(Call& call) {
  return call.t(0).dtype == BF16 ? with_dense(call, prefill) : avx512::attn_prefill_exports[0].run(call);
}
static Status attention_paged_prefill(Call& call) {
  return call.t(0).dtype == BF16 ? with_pages(call, prefill) : avx512::attn_prefill_exports[1].run(call);
}

LZ_EXPORTS(amx_prefill) = {{"attention_prefill", DENSE_SIGNATURE, &attention_prefill},
                           {"attention_paged_prefill", PAGED_SIGNATURE, &attention_paged_prefill},
                           {nullptr, nullptr, nullptr}};

LZ_END
