// unit: portable neon avx2 avx512
// Attention of few queries over many keys: bound by reading the cache. Each key is read once for all heads of its group;
// while scores are computed the values of the tile are fetched, and while these are summed, the next tile's keys.
//
// The keys of a sequence are cut into chunks whose length depends on the problem only, never on the threads, and partial
// results are merged in order: the same bits for any number of threads.
#include "attn.hpp"
#include "attn_entry.hpp"
#include "gemm_dot.hpp"

LZ_BEGIN

constexpr int MAX_ROWS = 128, MAX_HEADS = 8;
static const char NO_ROOM[] = "no memory for partial results";

template <bool ADD> LZ_INLINE void keep(float* to, v4 found) {
  if constexpr (ADD) {
    v4 there;
    memcpy(&there, to, 16);
    found = found + there;
  }
  memcpy(to, &found, 16);
}

// Scores of `rows` rows against n keys; prefetches the values of the same keys. With ADD they are added to what is there.
template <bool ADD = false, class T>
__attribute__((noinline)) static void score_tile(const float* q, int64_t q_step, int rows, const T* const* kp, const T* const* vp, int n, int64_t dim,
                       int64_t fetch, float* s) {
  for (int j = 0; j < n; j += 4) {
    const int e1 = j + 1 < n ? j + 1 : n - 1, e2 = j + 2 < n ? j + 2 : n - 1, e3 = j + 3 < n ? j + 3 : n - 1;
    if (fetch) {
      prefetch_row(vp[j], fetch), prefetch_row(vp[e1], fetch);
      prefetch_row(vp[e2], fetch), prefetch_row(vp[e3], fetch);
    }
    v4 out[4];
    int r = 0;
    for (; r + DOT_ROWS <= rows; r += DOT_ROWS) {
      dot4<DOT_ROWS>(q + r * q_step, q_step, kp[j], kp[e1], kp[e2], kp[e3], dim, out);
      for (int i = 0; i < DOT_ROWS; ++i) keep<ADD>(s + (r + i) * TILE + j, out[i]);
    }
    for (; r < rows; ++r) {
      dot4<1>(q + r * q_step, q_step, kp[j], kp[e1], kp[e2], kp[e3], dim, out);
      keep<ADD>(s + r * TILE + j, out[0]);
    }
  }
}

#if LZ_LANES == 8 || (LZ_LANES == 4 && !defined(__aarch64__))
constexpr int SUM_COLS = 2;
#else
constexpr int SUM_COLS = 4;
#endif

// acc[r][c] = acc[r][c] * factor[r] + sum over keys of weight[r][key] * v[key][c], for R rows and C vectors of columns.
template <int R, int C, class T>
LZ_INLINE void weigh(float* acc, int64_t acc_step, const float* factor, const float* w, const T* const* vp, int n, int64_t at,
                     const T* const* next, int64_t fetch) {
  vf s[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) s[r][c] = load(acc + r * acc_step + at + c * W) * factor[r];
  for (int j = 0; j < n; ++j) {
    const T* v = vp[j] + at;
    if (fetch) prefetch_row(next[j], fetch);
    vf x[C];
    if constexpr (C % 2 == 0) {
      for (int c = 0; c < C; c += 2) {
        const Pair two = load_pair(v + c * W);
        x[c] = two.low, x[c + 1] = two.high;
      }
    } else {
      x[0] = load(v);
    }
    for (int r = 0; r < R; ++r) {
      vf y = splat(w[r * TILE + j]);
      for (int c = 0; c < C; ++c) s[r][c] = fma(x[c], y, s[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(acc + r * acc_step + at + c * W, s[r][c]);
}

template <int R, class T>
__attribute__((noinline)) static void weigh_rows(float* acc, int64_t acc_step, const float* factor, const float* w, const T* const* vp, int n,
                       int64_t dim, const T* const* next, int64_t fetch) {
  int64_t at = 0;
  for (; at + SUM_COLS * W <= dim; at += SUM_COLS * W, fetch = 0)
    weigh<R, SUM_COLS>(acc, acc_step, factor, w, vp, n, at, next, fetch);
  for (; at + 2 * W <= dim; at += 2 * W, fetch = 0) weigh<R, 2>(acc, acc_step, factor, w, vp, n, at, next, fetch);
  for (; at + W <= dim; at += W, fetch = 0) weigh<R, 1>(acc, acc_step, factor, w, vp, n, at, next, fetch);
  if (at < dim) {
    vf s[R];
    for (int r = 0; r < R; ++r) s[r] = load(acc + r * acc_step + at) * factor[r];
    for (int j = 0; j < n; ++j) {
      vf x = load_edge(vp[j] + at, dim - at);
      for (int r = 0; r < R; ++r) s[r] = fma(x, splat(w[r * TILE + j]), s[r]);
    }
    for (int r = 0; r < R; ++r) store(acc + r * acc_step + at, s[r]);
  }
}

// What a part keeps of one group of heads while it goes through its keys.
struct Group {
  float *q, *acc;  // [rows][step of each]
  Running* running;
};

// One chunk of keys for the rows of `heads` groups, which take turns at each tile: where the heads of a token lie side by
// side, memory is then read in order. Fills running and acc of each group; `s` is room for the scores of one.
template <class T>
__attribute__((noinline)) static void attend(const Problem& p, const Sequence& seq, int64_t kv_head, int heads, int64_t begin,
                                             int64_t end, const Group* group, float* s) {
  const int rows = int(p.group * seq.queries);
  const int64_t q_step = padded(p.dim) + padded(p.dim_rest), step = padded(p.dim_v);
  const int64_t k_bytes = p.dim * int64_t(sizeof(T)), v_bytes = p.dim_v * int64_t(sizeof(T));
  Band band[MAX_ROWS];
  float factor[MAX_ROWS];
  int64_t first = end, last = begin;
  for (int r = 0; r < rows; ++r) {
    const int64_t query = r / p.group;
    band[r] = band_of(p.rules, seq, query);
    if (band[r].begin < first) first = band[r].begin;
    if (band[r].end > last) last = band[r].end;
    for (int h = 0; h < heads; ++h) {
      const int64_t head = (kv_head + h) * p.group + r % p.group;
      const T* q = reinterpret_cast<const T*>(p.q) + seq.q_at + head * p.q_head + query * p.q_seq;
      widen_row(q, p.dim, group[h].q + r * q_step, p.rules.scale);
      if (p.kv.rest) {
        const T* more = reinterpret_cast<const T*>(p.q_rest) + head * p.q_rest_head + (seq.first + query) * p.q_rest_seq;
        widen_row(more, p.dim_rest, group[h].q + r * q_step + padded(p.dim), p.rules.scale);
      }
      group[h].running[r] = {-INF, 0.0f};
      for (int64_t c = 0; c < step; c += W) store(group[h].acc + r * step + c, splat(0.0f));
    }
  }
  if (first < begin) first = begin;
  if (last > end) last = end;
  const T *keys[2][TILE], *values[2][TILE];
  const int tile = k_bytes > 256 ? TILE / 2 : TILE;
  int n = int(last - first < tile ? last - first : tile), turn = 0, h = 0;
  if (n > 0) p.kv.rows(seq.batch, kv_head, first, n, keys[0], values[0]);
  while (first < last) {
    // The next turn: the next head of this tile, or the first of the next tile.
    const int next_h = h + 1 < heads ? h + 1 : 0;
    const int64_t next = next_h ? first : first + n;
    const int more = next_h ? n : int(last - next < tile ? last - next : tile);
    if (more > 0) p.kv.rows(seq.batch, kv_head + next_h, next, more, keys[turn ^ 1], values[turn ^ 1]);
    for (int j = more > 0 ? more : 0; j < n; ++j) keys[turn ^ 1][j] = keys[turn][n - 1];  // harmless to fetch
    const Group& g = group[h];
    score_tile(g.q, q_step, rows, keys[turn], values[turn], n, p.dim, v_bytes, s);
    if (p.kv.rest) {
      const T* rest[TILE];
      p.kv.rest_rows(seq.batch, first, n, rest);
      score_tile<true>(g.q + padded(p.dim), q_step, rows, rest, rest, n, p.dim_rest, 0, s);
    }
    for (int r = 0; r < rows; ++r) {
      finish_scores(s + r * TILE, n, first, p, seq, (kv_head + h) * p.group + r % p.group, r / p.group, band[r]);
      factor[r] = soften(s + r * TILE, int(padded(n)), g.running[r]);
    }
    int r = 0;
    const T* const* ahead = keys[turn ^ 1];
    int64_t fetch = more > 0 ? k_bytes : 0;
    for (; r + 4 <= rows; r += 4, fetch = 0)
      weigh_rows<4>(g.acc + r * step, step, factor + r, s + r * TILE, values[turn], n, p.dim_v, ahead, fetch);
    for (; r + 2 <= rows; r += 2, fetch = 0)
      weigh_rows<2>(g.acc + r * step, step, factor + r, s + r * TILE, values[turn], n, p.dim_v, ahead, fetch);
    if (r < rows) weigh_rows<1>(g.acc + r * step, step, factor + r, s + r * TILE, values[turn], n, p.dim_v, ahead, fetch);
    turn ^= 1, h = next_h, first = next, n = more;
  }
}

template <class T> static Status decode(const Problem& p) {
  int64_t longest = 0, most = 0;
  for (int64_t b = 0; b < p.sequences; ++b) {
    if (p.sequence[b].keys > longest) longest = p.sequence[b].keys;
    if (p.sequence[b].queries > most) most = p.sequence[b].queries;
  }
  const int64_t rows = p.group * most, groups = p.sequences * p.kv_heads, step = padded(p.dim_v);
  if (rows > MAX_ROWS) return "decode attention takes at most 128 query rows for each key head";
  // By the length alone: the bits of a head do not depend on how many heads or threads there are.
  const int64_t chunk = longest <= 4096 ? 512 : longest <= 16384 ? 1024 : 2048;
  const int64_t chunks = longest > chunk ? (longest + chunk - 1) / chunk : 1;
  // Where the heads of a token lie side by side, a part takes several of them, as long as there are parts for all threads;
  // what a head computes does not depend on it.
  int64_t heads = 1;
  if (p.kv.k_head < p.kv.k_seq)
    while (heads < MAX_HEADS && p.kv_heads % (2 * heads) == 0 && p.sequences * chunks * p.kv_heads >= 8 * heads * p.threads) heads *= 2;
  const int64_t q_floats = rows * (padded(p.dim) + padded(p.dim_rest)), acc_floats = rows * step, one = acc_floats + 2 * rows;
  const size_t work = size_t(rows * TILE + heads * (q_floats + one)) * sizeof(float);
  float* partial = nullptr;
  if (chunks > 1) {
    partial = static_cast<float*>(malloc(size_t(groups * chunks * one) * sizeof(float)));
    if (!partial) return NO_ROOM;
  }
  const int64_t turns = p.kv_heads / heads;
  bool failed = false;
  parallel_parts(p.sequences * turns * chunks, p.threads, [&](int64_t part) {
    const int64_t number = part % chunks, b = part / chunks / turns, kv_head = part / chunks % turns * heads;
    const Sequence& seq = p.sequence[b];
    float* mine = static_cast<float*>(scratch(work));
    if (!mine) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    Group group[MAX_HEADS];
    for (int64_t h = 0; h < heads; ++h) {
      float* q = mine + rows * TILE + h * (q_floats + one);
      float* acc = partial ? partial + ((b * p.kv_heads + kv_head + h) * chunks + number) * one : q + q_floats;
      group[h] = {q, acc, reinterpret_cast<Running*>(acc + acc_floats)};
    }
    const int64_t begin = number * chunk < seq.keys ? number * chunk : seq.keys;
    const int64_t end = number + 1 < chunks && begin + chunk < seq.keys ? begin + chunk : seq.keys;
    attend<T>(p, seq, kv_head, int(heads), begin, end, group, mine);
    if (partial) return;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < p.group * seq.queries; ++r)
        write_row<T>(p, seq, (kv_head + h) * p.group + r % p.group, r / p.group, group[h].running[r], group[h].acc + r * step);
  });
  if (!partial) return failed ? NO_ROOM : nullptr;
  parallel_parts(groups, p.threads, [&](int64_t group) {
    const Sequence& seq = p.sequence[group / p.kv_heads];
    float* acc = static_cast<float*>(scratch(size_t(step) * sizeof(float)));
    if (!acc) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    for (int64_t r = 0; r < p.group * seq.queries; ++r) {
      Running run = {-INF, 0.0f};
      auto at = [&](int64_t n) { return partial + (group * chunks + n) * one; };
      auto seen = [&](int64_t n) { return reinterpret_cast<const Running*>(at(n) + acc_floats)[r]; };
      for (int64_t n = 0; n < chunks; ++n)
        if (seen(n).max > run.max) run.max = seen(n).max;
      for (int64_t c = 0; c < step; c += W) store(acc + c, splat(0.0f));
      for (int64_t n = 0; n < chunks; ++n) {
        const Running part = seen(n);
        if (part.max == -INF && part.sum == 0.0f) continue;
        const float factor = part.max == run.max ? 1.0f : exp_of(part.max - run.max);
        run.sum += part.sum * factor;
        for (int64_t c = 0; c < step; c += W) store(acc + c, load(acc + c) + load(at(n) + r * step + c) * factor);
      }
      write_row<T>(p, seq, group % p.kv_heads * p.group + r % p.group, r / p.group, run, acc);
    }
  });
  free(partial);
  return failed ? NO_ROOM : nullptr;
}

static Status attention_decode(Call& call) {
  return with_dense(call, [](const Problem& p, DType dtype) -> Status {
    LZ_FLOATS(dtype, return decode<T>(p));
    return "decode attention takes float32, bfloat16 and float16";
  });
}
static Status attention_paged_decode(Call& call) {
  return with_pages(call, [](const Problem& p, DType dtype) -> Status {
    LZ_FLOATS(dtype, return decode<T>(p));
    return "paged attention takes float32, bfloat16 and float16";
  });
}

static Status attention_latent_decode(Call& call) {
  return with_latent(call, [](const Problem& p, DType dtype) -> Status {
    LZ_FLOATS(dtype, return decode<T>(p));
    return "latent attention takes float32, bfloat16 and float16";
  });
}

LZ_EXPORTS(attn_decode) = {{"attention_decode", DENSE_SIGNATURE, &attention_decode},
                           {"attention_paged_decode", PAGED_SIGNATURE, &attention_paged_decode},
                           {"attention_latent_decode", LATENT_SIGNATURE, &attention_latent_decode},
                           {nullptr, nullptr, nullptr}};

LZ_END
