// The largest logit of every run of 64, in one pass, and of all.
#pragma once
#include "pair.hpp"

namespace lz {
namespace LZ_ISA {
namespace {

constexpr int64_t RUN = 64;

// Whether a NaN was among the numbers.
struct Bad {
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
  uint32_t seen = 0;
  LZ_INLINE void look(vf a, vf b) {
    seen |= _mm512_cmp_ps_mask(bit_cast<__m512>(a), bit_cast<__m512>(b), _CMP_UNORD_Q);
  }
  LZ_INLINE bool any() const { return seen != 0; }
#else
  vi seen = {};
  LZ_INLINE void look(vf a, vf b) { seen |= (a != a) | (b != b); }
  LZ_INLINE bool any() const {
    int32_t all = 0;
    for (int lane = 0; lane < W; ++lane) all |= seen[lane];
    return all != 0;
  }
#endif
};

template <class T> LZ_INLINE void peaks_of(const T* x, int64_t n, float* peaks) {
  Bad bad;
  for (int64_t run = 0; run * RUN < n; ++run) {
    const T* from = x + run * RUN;
    int64_t m = n - run * RUN < RUN ? n - run * RUN : RUN, i = 0;
    vf best = splat(-__builtin_inff()), other = best;
    for (; i + 2 * W <= m; i += 2 * W) {
      pair v = load2(from + i);
      best = vmax(v.a, best), other = vmax(v.b, other);
      bad.look(v.a, v.b);
    }
    for (; i < m; i += W) {
      vf v = i + W <= m ? load(from + i) : load_part(from + i, m - i, -__builtin_inff());
      best = vmax(v, best);
      bad.look(v, v);
    }
    peaks[run] = max_of(vmax(best, other));
  }
  if (n > 0 && bad.any()) peaks[0] = __builtin_nanf("");
}

// The largest peak; NaN where one is.
LZ_INLINE float head_of(const float* peaks, int64_t runs) {
  vf best = splat(-__builtin_inff());
  Bad bad;
  for (int64_t i = 0; i < runs; i += W) {
    vf v = i + W <= runs ? load(peaks + i) : load_part(peaks + i, runs - i, -__builtin_inff());
    best = vmax(v, best);
    bad.look(v, v);
  }
  return bad.any() ? __builtin_nanf("") : max_of(best);
}

}  // namespace
}  // namespace LZ_ISA
}  // namespace lz
