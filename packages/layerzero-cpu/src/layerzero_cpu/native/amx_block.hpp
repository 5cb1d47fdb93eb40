// One block of query rows of prefill attention on tiles, over all its keys. The scores of the next step and the softmax of
// this one take turns in the instruction stream, closely enough for the processor to run tile and vector units side by side.
#pragma once
#include "amx_attn.hpp"

namespace lz {
namespace LZ_ISA {

// 32 rows: what they see, relative to the first packed key, and where their sums are.
struct Strip {
  int32_t begin[STRIP], end[STRIP];  // of each row
  int32_t some, all, least, most;    // keys seen by all rows: [some, all); by any: [least, most)
  Rows16 rows[2];
  char* q;      // tiles of pairs
  float* acc;   // tiles
  bool fresh;   // nothing added yet
};

struct Room {
  Strip* strips;
  float* scores[2];
  uint32_t* weights;
  float* line;  // 16 rows of results
};

static int64_t strip_bytes(const Sizes& s) { return int64_t(2) * (s.steps + s.columns) * TILE_BYTES + int64_t(sizeof(Strip)) + 64; }
static size_t room_bytes(int strips, const Sizes& s) {
  return size_t(strips * strip_bytes(s) + BLOCK_UNITS * (2 * 4096 + 2048) + 16 * s.columns * 64 + 128);
}
static Room cut_room(char* at, int strips, const Sizes& s) {
  Room r;
  auto take = [&](int64_t bytes) {
    char* here = at;
    at += (bytes + 63) / 64 * 64;
    return here;
  };
  r.scores[0] = reinterpret_cast<float*>(take(BLOCK_UNITS * 4096));
  r.scores[1] = reinterpret_cast<float*>(take(BLOCK_UNITS * 4096));
  r.weights = reinterpret_cast<uint32_t*>(take(BLOCK_UNITS * 2048));
  r.line = reinterpret_cast<float*>(take(16 * s.columns * 64));
  r.strips = reinterpret_cast<Strip*>(take(strips * int64_t(sizeof(Strip))));
  for (int i = 0; i < strips; ++i) {
    r.strips[i].q = take(2 * s.steps * TILE_BYTES);
    r.strips[i].acc = reinterpret_cast<float*>(take(2 * s.columns * TILE_BYTES));
  }
  return r;
}

// The rows of queries [from, to) of one key head: row r is query from + r / group of head r % group.
struct Block {
  const Problem& p;
  const Sizes& sizes;
  const Packed& packed;
  const Room& room;
  int64_t from;
  int rows, strips;
  bool plain;   // scores need a scale and a band, nothing else
  float gain;   // from scores as they are stored to powers of two

  int64_t query_of(int r) const { return from + (r < rows ? r : rows - 1) / p.group; }
  int64_t head_of(int r) const { return packed.head * p.group + (r < rows ? r : rows - 1) % p.group; }

  void open() const {
    uint32_t edge[16][16];
    for (int i = 0; i < strips; ++i) {
      Strip& s = room.strips[i];
      s.fresh = true, s.some = 0, s.all = INT32_MAX, s.least = INT32_MAX, s.most = 0;
      for (int j = 0; j < 2; ++j) s.rows[j] = {splat(-INF), splat(0.0f)};
      for (int r = 0; r < STRIP; ++r) {
        const Band band = band_of(p.rules, *packed.seq, query_of(i * STRIP + r));
        s.begin[r] = int32_t(band.begin - packed.first * UNIT), s.end[r] = int32_t(band.end - packed.first * UNIT);
        if (s.begin[r] > s.some) s.some = s.begin[r];
        if (s.end[r] < s.all) s.all = s.end[r];
        if (band.begin >= band.end) continue;
        if (s.begin[r] < s.least) s.least = s.begin[r];
        if (s.end[r] > s.most) s.most = s.end[r];
      }
      for (int t = 0; t < 2; ++t) {
        for (int d = 0; d < sizes.steps; ++d) {
          const uint32_t* at[16];
          for (int r = 0; r < 16; ++r) {
            const int row = i * STRIP + t * 16 + r;
            const bf16* q = reinterpret_cast<const bf16*>(p.q) + packed.seq->q_at + head_of(row) * p.q_head + query_of(row) * p.q_seq + d * 32;
            at[r] = reinterpret_cast<const uint32_t*>(q);
            if (p.dim - d * 32 < 32) {
              memset(edge[r], 0, 64);
              memcpy(edge[r], q, size_t(p.dim - d * 32) * 2);
              at[r] = edge[r];
            }
          }
          turn_words(at, 16, 16, reinterpret_cast<uint32_t*>(s.q + (t * sizes.steps + d) * TILE_BYTES));
        }
      }
    }
  }

  // A step: the units of one strip inside one block of keys.
  struct Step {
    int64_t block;
    int strip, unit, units;
  };
  bool settle(Step& at, int64_t blocks) const {  // the step at this place or the next one that has something to see
    for (; at.block < blocks; ++at.block, at.strip = 0) {
      for (; at.strip < strips; ++at.strip) {
        const Strip& s = room.strips[at.strip];
        const int64_t low = at.block * BLOCK_UNITS, high = low + BLOCK_UNITS;
        const int64_t first = s.least / UNIT > low ? s.least / UNIT : low;
        const int64_t last = (int64_t(s.most) + UNIT - 1) / UNIT < high ? (int64_t(s.most) + UNIT - 1) / UNIT : high;
        if (s.most <= s.least || first >= last) continue;
        at.unit = int(first), at.units = int(last - first);
        return true;
      }
    }
    return false;
  }

  void score(const Step& at, int u) const {
    score_unit(packed.keys + (at.unit + u) * sizes.key_bytes(), room.strips[at.strip].q, sizes.steps);
  }

  // What is not a plain product: cap, slopes, mask, and keys that not all rows see.
  __attribute__((noinline)) void finish(const Step& at, int u, float* scores) const {
    const Strip& s = room.strips[at.strip];
    const int key = (at.unit + u) * UNIT;
    const int64_t position = packed.first * UNIT + key;
    for (int t = 0; t < 2; ++t) {
      float* x = scores + u * 1024 + t * 512;
      const int row = at.strip * STRIP + t * 16;
      if (!plain) {
        for (int i = 0; i < UNIT; ++i) store(x + i * 16, load(x + i * 16) * p.rules.scale);
        if (p.rules.softcap != 0.0f)
          for (int i = 0; i < UNIT; ++i) store(x + i * 16, vtanh(load(x + i * 16) * (1.0f / p.rules.softcap)) * p.rules.softcap);
        if (p.rules.slopes) {
          float slope[16], away[16];
          for (int r = 0; r < 16; ++r) {
            slope[r] = p.rules.slopes[packed.seq->batch * p.rules.slopes_batch + head_of(row + r) * p.rules.slopes_head];
            away[r] = float(query_of(row + r) + packed.seq->keys - packed.seq->queries - position);
          }
          const vf slopes = load(slope), distance = load(away);
          for (int i = 0; i < UNIT; ++i) store(x + i * 16, load(x + i * 16) - slopes * vabs(distance - float(i)));
        }
        if (p.rules.mask) mask(x, row, position);
      }
      vi begin, end;
      memcpy(&begin, s.begin + t * 16, 64);
      memcpy(&end, s.end + t * 16, 64);
      for (int i = 0; i < UNIT; ++i) {
        const vi here = splat_i(key + i);
        store(x + i * 16, select((here >= begin) & (here < end), load(x + i * 16), splat(-INF)));
      }
    }
  }
  void mask(float* x, int row, int64_t position) const {
    const Rules& rules = p.rules;
    const int64_t left = packed.seq->keys - position, n = left < UNIT ? left : UNIT;
    for (int r = 0; r < 16; ++r) {
      int64_t at = packed.seq->batch * rules.mask_batch + head_of(row + r) * rules.mask_head + query_of(row + r) * rules.mask_query +
                   position * rules.mask_key;
      for (int64_t i = 0; i < n; ++i, at += rules.mask_key) {
        float& s = x[i * 16 + r];
        if (rules.mask_dtype == BOOL) s = rules.mask[at] ? s : -INF;
        else if (rules.mask_dtype == F32) s += reinterpret_cast<const float*>(rules.mask)[at];
        else s += to_float(reinterpret_cast<const bf16*>(rules.mask)[at]);
      }
    }
  }

  // Maxima of a step whose scores are done; sums of before are brought down where one has risen.
  void look(const Step& at, float* scores) const {
    Strip& s = room.strips[at.strip];
    for (int u = 0; u < at.units; ++u) {
      const int key = (at.unit + u) * UNIT;
      if (!plain || key < s.some || key + UNIT > s.all) finish(at, u, scores);
    }
    for (int t = 0; t < 2; ++t) {
      vf factor;
      if (!raise(scores + t * 512, at.units, gain, s.rows[t], factor) || s.fresh) continue;
      for (int c = 0; c < sizes.columns; ++c) {
        float* acc = s.acc + c * 512 + t * 256;
        for (int i = 0; i < 16; ++i) store(acc + i * 16, load(acc + i * 16) * factor);
      }
    }
  }

  void run() const {
    const TileSetup setup;
    const __m512i order = alternately();
    open();
    const int64_t blocks = (packed.units + BLOCK_UNITS - 1) / BLOCK_UNITS;
    Step now = {0, 0, 0, 0};
    bool here = settle(now, blocks);
    if (here)
      for (int u = 0; u < now.units; ++u) score(now, u), keep_unit(room.scores[0] + u * 1024);
    for (int turn = 0; here; turn ^= 1) {
      Step next = {now.block, now.strip + 1, 0, 0};
      const bool more = settle(next, blocks);
      Strip& s = room.strips[now.strip];
      float *scores = room.scores[turn], *ahead = room.scores[turn ^ 1];
      look(now, scores);
      const int coming = more ? next.units : 0;
      for (int u = 0; u < now.units || u < coming; ++u) {
        if (u < coming) score(next, u);
        for (int t = 0; t < 2 && u < now.units; ++t)
          soften_unit(scores + u * 1024 + t * 512, gain, s.rows[t], order, room.weights + u * 512 + t * 256);
        if (u < coming) keep_unit(ahead + u * 1024);
      }
      weigh_units(packed.values + now.unit * sizes.value_bytes(), room.weights, now.units, sizes.columns, s.acc, s.fresh);
      s.fresh = false;
      now = next, here = more;
    }
    close();
  }

  void close() const {
    const int64_t width = sizes.columns * 16;
    for (int r = 0; r < rows; r += 16) {
      const Strip& s = room.strips[r / STRIP];
      const int t = r % STRIP / 16;
      for (int c = 0; c < sizes.columns; ++c) {
        alignas(64) uint32_t turned[256];
        const uint32_t* at[16];
        for (int i = 0; i < 16; ++i) at[i] = reinterpret_cast<const uint32_t*>(s.acc + c * 512 + t * 256 + i * 16);
        if (s.fresh) memset(turned, 0, sizeof turned);
        else turn_words(at, 16, 16, turned);
        for (int i = 0; i < 16; ++i) memcpy(room.line + i * width + c * 16, turned + i * 16, 64);
      }
      for (int i = 0; i < 16 && r + i < rows; ++i) {
        const Running done = {s.rows[t].max[i] * LN2, s.rows[t].sum[i]};
        write_row<bf16>(p, *packed.seq, head_of(r + i), query_of(r + i), done, room.line + i * width);
      }
    }
  }
};

}  // namespace LZ_ISA
}  // namespace lz
