// unit: portable neon avx2 avx512
// Attention of many queries: blocks of rows against tiles of keys, with a running softmax, so that no score matrix is
// held. The rows of all heads of a GQA group stand in one block and share each tile, packed once to float for all of them.
//
// Tiles begin at multiples of their length whatever the block, and a key that a row does not see adds nothing to it: the bits
// of a row depend on its own keys alone. Under the names with `fixed` it is called for any number of queries, on every
// processor (there is no such name among the kernels for tiles of AMX).
#include "attn.hpp"
#include "attn_entry.hpp"
#include "gemm_dot.hpp"
#include "gemm_panel.hpp"
#include "turn.hpp"

LZ_BEGIN

constexpr int BLOCK_ROWS = 128;

struct Room {
  float *q, *keys, *values, *scores, *acc;
  Running* running;
  Band* band;
  int64_t dim, dim_v;  // padded
};

static size_t room_bytes(int64_t rows, int64_t dim, int64_t dim_v) {
  return size_t(rows * (dim + TILE + dim_v) + TILE * (dim + dim_v)) * sizeof(float) + size_t(rows) * (sizeof(Running) + sizeof(Band));
}

static Room cut_room(char* memory, int64_t rows, int64_t dim, int64_t dim_v) {
  Room r;
  r.dim = dim, r.dim_v = dim_v;
  r.band = reinterpret_cast<Band*>(memory);
  r.q = reinterpret_cast<float*>(r.band + rows);
  r.keys = r.q + rows * dim;
  r.values = r.keys + TILE * dim;
  r.scores = r.values + TILE * dim_v;
  r.acc = r.scores + rows * TILE;
  r.running = reinterpret_cast<Running*>(r.acc + rows * dim_v);
  return r;
}

// So many keys in whole vectors.
static int whole_vectors(int64_t keys) { return int((keys + W - 1) / W * W); }

// Keys as columns: keys[d][j]; columns n … whole_vectors(n)-1 are zero, those after them are not read.
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
template <class T> static void pack_keys(const T* const* kp, int n, int64_t dim, float* to) {
  for (int j = 0; j < n; j += W) {
    for (int64_t d = 0; d < dim; d += W) {
      __m512i r[W];
      for (int i = 0; i < W; ++i) {
        if (j + i >= n) r[i] = _mm512_setzero_si512();
        else r[i] = bit_cast<__m512i>(dim - d >= W ? load(kp[j + i] + d) : load_edge(kp[j + i] + d, dim - d));
      }
      turn(r, [&](int i, __m512i row) { store(to + (d + i) * TILE + j, bit_cast<vf>(row)); });
    }
  }
}
#else  // four rows are turned at a time
template <class T> static void pack_keys(const T* const* kp, int n, int64_t dim, float* to) {
  float line[4][256 + 16];
  for (int j = 0; j < whole_vectors(n); j += 4) {
    for (int i = 0; i < 4; ++i) {
      if (j + i < n) widen_row(kp[j + i], dim, line[i], 1.0f);
      else memset(line[i], 0, size_t(dim) * sizeof(float));
    }
    for (int64_t d = 0; d < dim; ++d) {
      v4 four = {line[0][d], line[1][d], line[2][d], line[3][d]};
      memcpy(to + d * TILE + j, &four, 16);
    }
  }
}
#endif

template <class T> static void pack_values(const T* const* vp, int n, int64_t dim, int64_t step, float* to) {
  for (int j = 0; j < whole_vectors(n); ++j) {
    if (j < n) widen_row(vp[j], dim, to + j * step, 1.0f);
    else memset(to + j * step, 0, size_t(step) * sizeof(float));
  }
}

static bool all_see(const Band* band, int rows, int64_t first, int n) {
  for (int r = 0; r < rows; ++r)
    if (band[r].begin > first || band[r].end < first + n) return false;
  return true;
}

// How many keys of a tile, in whole vectors, the one of some rows sees that sees the furthest.
static int seen(const Band* band, int rows, int64_t first, int n) {
  int64_t last = first;
  for (int r = 0; r < rows; ++r)
    if (band[r].end > last) last = band[r].end;
  return whole_vectors(last - first < n ? last - first : n);
}

// Queries from … to - 1 of one sequence, for the heads of one group.
template <class T> static void attend_block(const Problem& p, const Sequence& seq, int64_t kv_head, int64_t from, int64_t to, const Room& room) {
  const int rows = int((to - from) * p.group);
  int64_t first = seq.keys, last = 0;
  for (int r = 0; r < rows; ++r) {
    const int64_t query = from + r / p.group, head = kv_head * p.group + r % p.group;
    float* q = room.q + r * room.dim;
    for (int64_t d = padded(p.dim) - W; d < room.dim; d += W) store(q + d, splat(0.0f));
    widen_row(reinterpret_cast<const T*>(p.q) + seq.q_at + head * p.q_head + query * p.q_seq, p.dim, q, p.rules.scale);
    room.band[r] = band_of(p.rules, seq, query);
    if (room.band[r].begin < first) first = room.band[r].begin;
    if (room.band[r].end > last) last = room.band[r].end;
    room.running[r] = {-INF, 0.0f};
  }
  memset(room.acc, 0, size_t(rows * room.dim_v) * sizeof(float));
  memset(room.keys + p.dim * TILE, 0, size_t((room.dim - p.dim) * TILE) * sizeof(float));
  const T *keys[TILE], *values[TILE];
  first = first / TILE * TILE;
  for (; first < last; first += TILE) {
    const int n = int(last - first < TILE ? last - first : TILE);
    p.kv.rows(seq.batch, kv_head, first, n, keys, values);
    pack_keys(keys, n, p.dim, room.keys);
    pack_values(values, n, p.dim_v, room.dim_v, room.values);
    // Rows are in the order of their queries: those before `low` end before this tile, or those from `high` begin after.
    int low = 0, high = rows;
    while (low < high && (room.band[low].end <= first || room.band[low].begin >= first + n)) ++low;
    while (high > low && (room.band[high - 1].end <= first || room.band[high - 1].begin >= first + n)) --high;
    // Where rows end inside the tile, as on the diagonal, a few of them at a time, and only as far as the last of these sees.
    const bool whole = all_see(room.band + low, high - low, first, n);
    const int step = whole ? high - low : PANEL_ROWS;
    float* s = room.scores;
    for (int r = low; r < high; r += step) {
      const int some = high - r < step ? high - r : step;
      const int width = whole ? whole_vectors(n) : seen(room.band + r, some, first, n);
      if (width == 0) continue;
      multiply(room.q + r * room.dim, room.dim, room.keys, TILE, s + r * TILE, TILE, some, width, room.dim, true);
      for (int i = r; i < r + some; ++i) {
        finish_scores(s + i * TILE, n, first, p, seq, kv_head * p.group + i % p.group, from + i / p.group, room.band[i]);
        const float factor = soften(s + i * TILE, width, room.running[i]);
        if (factor != 1.0f)
          for (int64_t c = 0; c < room.dim_v; c += W) store(room.acc + i * room.dim_v + c, load(room.acc + i * room.dim_v + c) * factor);
      }
      multiply(s + r * TILE, TILE, room.values, room.dim_v, room.acc + r * room.dim_v, room.dim_v, some, room.dim_v, width, false);
    }
  }
  for (int r = 0; r < rows; ++r)
    write_row<T>(p, seq, kv_head * p.group + r % p.group, from + r / p.group, room.running[r], room.acc + r * room.dim_v);
}

template <class T> static Status prefill(const Problem& p) {
  int64_t most = 0;
  for (int64_t b = 0; b < p.sequences; ++b)
    if (p.sequence[b].queries > most) most = p.sequence[b].queries;
  int64_t queries = p.group >= BLOCK_ROWS ? 1 : BLOCK_ROWS / p.group;
  if (queries > most) queries = most;
  const int64_t blocks = (most + queries - 1) / queries, rows = queries * p.group;
  const int64_t dim = (p.dim + W - 1) / W * W, dim_v = (p.dim_v + W - 1) / W * W;
  bool failed = false;
  parallel_parts(p.sequences * p.kv_heads * blocks, p.threads, [&](int64_t part) {
    // The last blocks of a causal sequence are the longest: they come first, so that the end is even.
    const int64_t block = blocks - 1 - part / (p.sequences * p.kv_heads), group = part % (p.sequences * p.kv_heads);
    const Sequence& seq = p.sequence[group / p.kv_heads];
    const int64_t from = block * queries, to = from + queries < seq.queries ? from + queries : seq.queries;
    if (from >= to) return;
    char* memory = static_cast<char*>(scratch(room_bytes(rows, dim, dim_v)));
    if (!memory) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      return;
    }
    attend_block<T>(p, seq, group % p.kv_heads, from, to, cut_room(memory, rows, dim, dim_v));
  });
  return failed ? "no memory for a block of rows" : nullptr;
}

static Status attention_prefill(Call& call) {
  return with_dense(call, [](const Problem& p, DType dtype) -> Status {
    LZ_FLOATS(dtype, return prefill<T>(p));
    return "attention takes float32, bfloat16 and float16";
  });
}
static Status attention_paged_prefill(Call& call) {
  return with_pages(call, [](const Problem& p, DType dtype) -> Status {
    LZ_FLOATS(dtype, return prefill<T>(p));
    return "paged attention takes float32, bfloat16 and float16";
  });
}

LZ_EXPORTS(attn_prefill) = {{"attention_prefill", DENSE_SIGNATURE, &attention_prefill},
                            {"attention_paged_prefill", PAGED_SIGNATURE, &attention_paged_prefill},
                            {"attention_fixed", DENSE_SIGNATURE, &attention_prefill},
                            {"attention_paged_fixed", PAGED_SIGNATURE, &attention_paged_prefill},
                            {nullptr, nullptr, nullptr}};

LZ_END
