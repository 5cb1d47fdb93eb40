// unit: amx
// Prefill attention of bf16 on tiles. Keys and values are packed once a call, for all query blocks and all heads of a group;
// then every block of queries goes over its keys in steps of 256, with a running softmax. Sums are float; weights are rounded
// to bf16 for the second product, as flash attention does on GPUs.
#include "amx_block.hpp"
#include "attn_entry.hpp"

namespace lz {
namespace avx512 {
extern const Kernel attn_prefill_exports[];  // for float32 and fp16
}
}  // namespace lz

LZ_BEGIN

constexpr int64_t MOST_PACKED = 24 << 20;  // bytes packed at a time: what malloc gives back to itself, and a cache holds

// The heads of some sequences, packed together: keys and values first, then the blocks of queries.
static bool wave(const Problem& p, const Sizes& sizes, const Packed* group, int64_t count, int64_t most) {
  int64_t units = 0;
  for (int64_t i = 0; i < count; ++i)
    if (group[i].units > units) units = group[i].units;
  constexpr int64_t CHUNK = 4;
  const int64_t chunks = (units + CHUNK - 1) / CHUNK;
  parallel_parts(count * chunks, p.threads, [&](int64_t part) {
    const Packed& to = group[part / chunks];
    const int64_t first = part % chunks * CHUNK, last = first + CHUNK < to.units ? first + CHUNK : to.units;
    for (int64_t u = first; u < last; ++u) pack_unit(p, sizes, to, u);
  });
  // Rows of a block: many, so that each key read serves them all, but no fewer blocks than threads can share evenly.
  int64_t rows = 128;
  while (rows > 32 && count * ((most * p.group + rows - 1) / rows) < 4 * int64_t(p.threads)) rows /= 2;
  const int64_t queries = rows > p.group ? rows / p.group : 1;
  const int64_t blocks = (most + queries - 1) / queries;
  const int strips = int((queries * p.group + STRIP - 1) / STRIP);
  const bool plain = p.rules.softcap == 0.0f && !p.rules.slopes && !p.rules.mask && p.rules.scale > 0.0f && p.rules.scale < INF;
  bool failed = false;
  parallel_parts(count * blocks, p.threads, [&](int64_t part) {
    // The last blocks of a causal sequence are the longest: they come first, so that the end is even.
    const int64_t block = blocks - 1 - part / count;
    const Packed& packed = group[part % count];
    const int64_t from = block * queries, to = from + queries < packed.seq->queries ? from + queries : packed.seq->queries;
    if (from >= to) return;
    char* memory = static_cast<char*>(scratch(room_bytes(strips, sizes)));
    if (!memory) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    const int some = int((to - from) * p.group);
    const Room room = cut_room(memory, strips, sizes);
    const float gain = plain ? p.rules.scale * LOG2E : LOG2E;
    Block{p, sizes, packed, room, from, some, (some + STRIP - 1) / STRIP, plain, gain}.run();
  });
  return !failed;
}

static Status prefill(const Problem& p, DType dtype) {
  if (dtype != BF16) return "attention on tiles takes bfloat16";
  const Sizes sizes = {int((p.dim + 31) / 32), int((p.dim_v + 15) / 16)};
  const int64_t heads = p.sequences * p.kv_heads, unit_bytes = sizes.key_bytes() + sizes.value_bytes();
  Packed* all = static_cast<Packed*>(malloc(size_t(heads) * sizeof(Packed)));
  if (!all) return "no memory for the heads";
  int64_t largest = 0;
  for (int64_t i = 0; i < heads; ++i) {
    const Sequence& seq = p.sequence[i / p.kv_heads];
    // Bands move forward from query to query: the first one's begin and the last one's end hold them all.
    const int64_t first = band_of(p.rules, seq, 0).begin / UNIT, end = band_of(p.rules, seq, seq.queries - 1).end;
    const int64_t units = (end + UNIT - 1) / UNIT - first;
    all[i] = {&seq, i % p.kv_heads, first, units > 0 ? units : 0, nullptr, nullptr};
    if (all[i].units * unit_bytes > largest) largest = all[i].units * unit_bytes;
  }
  int64_t room = largest > MOST_PACKED ? largest : MOST_PACKED, total = 0;
  for (int64_t i = 0; i < heads && total <= room; ++i) total += all[i].units * unit_bytes;
  if (total < room) room = total;
  char* memory = static_cast<char*>(malloc(size_t(room) + 64));
  Status wrong = memory ? nullptr : "no memory for keys and values";
  for (int64_t begin = 0; begin < heads && !wrong;) {
    char* at = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
    int64_t end = begin, used = 0, most = 0;
    for (; end < heads && (end == begin || used + all[end].units * unit_bytes <= room); ++end) {
      all[end].keys = at + used;
      all[end].values = all[end].keys + all[end].units * sizes.key_bytes();
      used += all[end].units * unit_bytes;
      if (all[end].seq->queries > most) most = all[end].seq->queries;
    }
    if (!wave(p, sizes, all + begin, end - begin, most)) wrong = "no memory for a block of rows";
    begin = end;
  }
  free(memory);
  free(all);
  return wrong;
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
