// Ranks and weights of tokens: exponentials in double, and selection by halving instead of sorting.
#pragma once
#include "pair.hpp"

namespace lz {
namespace LZ_ISA {
namespace {

constexpr int D = W / 2;  // doubles in a vector
typedef double vd __attribute__((vector_size(4 * LZ_LANES)));
typedef int64_t vq __attribute__((vector_size(4 * LZ_LANES)));
typedef float vhf __attribute__((vector_size(2 * LZ_LANES)));

LZ_INLINE void split(vf v, vd* low, vd* high) {
  vhf part[2];
  memcpy(part, &v, sizeof v);
  *low = __builtin_convertvector(part[0], vd);
  *high = __builtin_convertvector(part[1], vd);
}

LZ_INLINE double sum(vd v) {
  double total = 0.0;
  for (int lane = 0; lane < D; ++lane) total += v[lane];
  return total;
}

// e^x for x <= 0 in double.
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
alignas(64) constexpr double ROOTS[16] = {  // 2^(j/16)
      1.0, 1.0442737824274138, 1.0905077326652577, 1.1387886347566916,
      1.189207115002721, 1.241857812073484, 1.2968395546510096, 1.3542555469368927,
      1.4142135623730951, 1.4768261459394993, 1.5422108254079407, 1.6104903319492543,
      1.681792830507429, 1.7562521603732995, 1.8340080864093424, 1.9152065613971474};

// x is n sixteenths of log 2 and a little: the root of two of n's last four bits, times the series of the little, times the
// power of two of the others.
LZ_INLINE vd exp_down(vd x) {
  __m512d t = _mm512_max_pd(bit_cast<__m512d>(x), _mm512_set1_pd(-746.0));
  vd shifted = bit_cast<vd>(t) * 23.083120654223414 + 6755399441055744.0;  // its last bits are n
  vd n = shifted - 6755399441055744.0;
  vd r = bit_cast<vd>(t) - n * (0.693147180369123816490 / 16);
  r = r - n * (1.90821492927058770002e-10 / 16);
  vd p = r * (1.0 / 720.0) + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r;
  vd root = bit_cast<vd>(
      _mm512_permutex2var_pd(_mm512_load_pd(ROOTS), bit_cast<__m512i>(shifted), _mm512_load_pd(ROOTS + 8)));
  return bit_cast<vd>(_mm512_scalef_pd(bit_cast<__m512d>(p * root + root), bit_cast<__m512d>(n * 0.0625)));
}
#else
// The remainder of x over log 2 by its series, then the power of two in two steps.
LZ_INLINE vd exp_down(vd x) {
  vd low = vd{} - 745.2;
  vd t = x > low ? x : low;
  vd n = t * 1.4426950408889634074 + 6755399441055744.0;
  vq k = bit_cast<vq>(n) - 0x4338000000000000;
  n = n - 6755399441055744.0;
  vd r = (t - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  vd p = vd{} + 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = (p * r) * r + r + 1.0;
  vq half = k >> 1;
  vd e = p * bit_cast<vd>((half + 1023) << 52) * bit_cast<vd>((k - half + 1023) << 52);
  return x < low ? vd{} : e;
}
#endif

// exp((logit - head) * inverse), where inverse is 1 / temperature; a logit at the head has no distance, be it infinite.
LZ_INLINE vd weight(vd logit, double head, double inverse) {
  vd far = logit - head;
  far = logit == head ? vd{} : far;
  return exp_down(far * inverse);
}

// The largest float not above x.
LZ_INLINE float below(double x) {
  float at = float(x);
  if (!(double(at) > x)) return at;
  if (at == 0.0f) return -1e-44f;
  int32_t bits = bit_cast<int32_t>(at);
  return bit_cast<float>(at > 0.0f ? bits - 1 : bits + 1);
}

struct Token {
  float logit;
  int32_t id;
};

struct Weighted {
  Token token;
  double weight;
};

LZ_INLINE bool ahead(Token a, Token b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }
LZ_INLINE bool ahead(const Weighted& a, const Weighted& b) { return ahead(a.token, b.token); }

struct Dice {  // pivots that no input can foresee badly, the same in every run
  uint64_t state = 0x9e3779b97f4a7c15ull;
  LZ_INLINE int64_t below(int64_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return int64_t((state >> 33) % uint64_t(n));
  }
};

// Parts x[low … high] so that what is left of `middle` is not behind the pivot, and what follows not ahead of it.
template <class E> LZ_INLINE void part(E* x, int64_t low, int64_t high, E pivot, int64_t* left, int64_t* right) {
  int64_t i = low, j = high;
  while (i <= j) {
    while (ahead(x[i], pivot)) ++i;
    while (ahead(pivot, x[j])) --j;
    if (i <= j) {
      E moved = x[i];
      x[i++] = x[j];
      x[j--] = moved;
    }
  }
  *left = j, *right = i;
}

// Brings the k-th of the ranking to its place.
template <class E> LZ_INLINE void select_kth(E* x, int64_t n, int64_t k) {
  int64_t low = 0, high = n - 1;
  Dice dice;
  while (low < high) {
    int64_t left, right;
    part(x, low, high, x[low + dice.below(high - low + 1)], &left, &right);
    if (k - 1 <= left) high = left;
    else if (k - 1 >= right) low = right;
    else return;
  }
}

Token kth_ranked(Weighted* x, int64_t n, int64_t k) {
  select_kth(x, n, k);
  return x[k - 1].token;
}

// The last token, by rank, before which the mass has not reached the goal; at least the first.
Token nucleus_end(Weighted* x, int64_t n, double goal) {
  int64_t low = 0, high = n - 1;
  double before = 0.0;  // mass of x[0 … low)
  Dice dice;
  while (high - low >= 16) {
    int64_t left, right;
    part(x, low, high, x[low + dice.below(high - low + 1)], &left, &right);
    if (right > high) right = high;  // the pivot alone at the end
    double mass = 0.0;
    for (int64_t i = low; i < right; ++i) mass += x[i].weight;
    if (before + mass < goal) before += mass, low = right;
    else high = right - 1;
  }
  for (int64_t i = low + 1; i <= high; ++i) {
    Weighted moved = x[i];
    int64_t j = i;
    for (; j > low && ahead(moved, x[j - 1]); --j) x[j] = x[j - 1];
    x[j] = moved;
  }
  int64_t last = low;
  for (; last <= high && before < goal; ++last) before += x[last].weight;
  if (last > 0 && last > low) return x[last - 1].token;
  if (low > 0) {  // everything up to low - 1 stays, nothing of the rest: the last of those by rank
    Token end = x[0].token;
    for (int64_t i = 1; i < low; ++i) end = ahead(end, x[i].token) ? x[i].token : end;
    return end;
  }
  return x[0].token;
}

}  // namespace
}  // namespace LZ_ISA
}  // namespace lz
