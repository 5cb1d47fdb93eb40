// Which tokens a filter keeps, found without sorting: by counting, by halving, and by sums of mass along the logits.
#pragma once
#include "sampling.hpp"

namespace lz {
namespace LZ_ISA {
namespace {

// Tokens in the order of their ids, and their weights.
struct List {
  float* logits;
  int32_t* ids;
  double* weights;
  int64_t count;
  LZ_INLINE Token at(int64_t i) const { return Token{logits[i], ids[i]}; }
};

LZ_INLINE int64_t count_from(const float* x, int64_t n, float floor) {
  vi counts = {};
  vf least = splat(floor);
  int64_t i = 0, rest = 0;
  for (; i + W <= n; i += W) counts -= (load(x + i) >= least);
  for (; i < n; ++i) rest += x[i] >= floor;
  for (int lane = 0; lane < W; ++lane) rest += counts[lane];
  return rest;
}

// Floats as whole numbers of the same order.
LZ_INLINE int32_t rank_of(float x) {
  int32_t bits = bit_cast<int32_t>(x);
  return bits < 0 ? int32_t(0x80000000u) - bits : bits;
}
LZ_INLINE float of_rank(int32_t rank) {
  return bit_cast<float>(rank < 0 ? int32_t(0x80000000u) - rank : rank);
}

// A number that at least k of x reach, and few more than k: none of the k largest lies below it. No NaN, and k <= n.
float floor_of(const float* x, int64_t n, int64_t k, float largest) {
  // rank_of(-inf) - 1 would be a NaN's: everything reaches -inf itself
  int64_t low = rank_of(-__builtin_inff()), high = int64_t(rank_of(largest)) + 1;  // low is reached by enough, high not
  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2, reached = count_from(x, n, of_rank(int32_t(middle)));
    if (reached < k) {
      high = middle;
      continue;
    }
    low = middle;
    if (reached <= k + k / 2 + 8) break;
  }
  return of_rank(int32_t(low));
}

// Tokens not below `floor` of x[begin … end) are added to the list.
template <class T> LZ_INLINE void gather(const T* x, int64_t begin, int64_t end, float floor, List* list) {
  int64_t i = begin, count = list->count;
#if (LZ_LANES == 16 || LZ_LANES == 8) && !defined(LZ_ISA_portable)
  for (; i + W <= end; i += W) {
    vf v = load(x + i);
#if LZ_LANES == 16
    uint32_t found = _mm512_cmp_ps_mask(bit_cast<__m512>(v), _mm512_set1_ps(floor), _CMP_GE_OQ);
#else
    __m256 reach = _mm256_cmp_ps(bit_cast<__m256>(v), _mm256_set1_ps(floor), _CMP_GE_OQ);
    uint32_t found = uint32_t(_mm256_movemask_ps(reach));
#endif
    for (; found; found &= found - 1) {
      int64_t at = i + __builtin_ctz(found);
      list->logits[count] = to_float(x[at]), list->ids[count++] = int32_t(at);
    }
  }
#endif
  for (; i < end; ++i) {
    float v = to_float(x[i]);
    if (v >= floor) list->logits[count] = v, list->ids[count++] = int32_t(i);
  }
  list->count = count;
}

// Keeps the k first by rank, in the order of ids.
void keep_ranked(List* list, int64_t k, Weighted* work) {
  for (int64_t i = 0; i < list->count; ++i) work[i] = Weighted{list->at(i), 0.0};
  Token cut = kth_ranked(work, list->count, k);
  int64_t kept = 0;
  for (int64_t i = 0; i < list->count; ++i)
    if (!ahead(cut, list->at(i))) list->logits[kept] = list->logits[i], list->ids[kept++] = list->ids[i];
  list->count = kept;
}

constexpr int STEPS = 512;

// The last token, by rank, before which the mass has not reached the goal; at least the first. The mass is summed in steps
// from the head down to the floor; only the step in which the goal is reached is looked at token by token.
Token nucleus_of(const List& list, double goal, float head, float floor, Weighted* work) {
  float span = head - floor, scale = float(STEPS - 1) / span;
  if (list.count <= STEPS || !(span > 0.0f) || !(scale > 0.0f) || !(scale < 1e30f)) {
    for (int64_t i = 0; i < list.count; ++i) work[i] = Weighted{list.at(i), list.weights[i]};
    return nucleus_end(work, list.count, goal);
  }
  double mass[STEPS] = {};
  auto step_of = [&](float logit) LZ_ALWAYS {
    int at = int((head - logit) * scale);
    return at < STEPS ? at : STEPS - 1;
  };
  for (int64_t i = 0; i < list.count; ++i) mass[step_of(list.logits[i])] += list.weights[i];
  double before = 0.0;
  int step = 0, last = 0;
  for (int at = 0; at < STEPS; ++at) last = mass[at] > 0.0 ? at : last;
  while (step < last && !(before + mass[step] >= goal)) before += mass[step++];
  int64_t inside = 0;
  for (int64_t i = 0; i < list.count; ++i)
    if (step_of(list.logits[i]) == step) work[inside++] = Weighted{list.at(i), list.weights[i]};
  return nucleus_end(work, inside, goal - before);
}

}  // namespace
}  // namespace LZ_ISA
}  // namespace lz
