// What every linear kernel does before and after its sums: compare the sizes; add the bias, apply the activation, store.
#pragma once
#include <stdlib.h>

#include "gemm_dot.hpp"

namespace lz {
namespace LZ_ISA {

enum Activation : int64_t { PLAIN = 0, SILU, RELU, GELU, GELU_TANH, ACTIVATIONS };

// tanh, to a few ulp: the odd series near zero, e^2x beyond.
LZ_INLINE vf vtanh(vf x) {
  vf a = vabs(x), square = x * x;
  vf small = x + x * square * (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f + square * 0.0218694885f)));
  vf e = vexp(a * 2.0f);
  vf big = 1.0f - 2.0f / (e + 1.0f);
  big = bit_cast<vf>(bit_cast<vu>(big) | (bit_cast<vu>(x) & 0x80000000u));
  return select(x != x, x, select(a < splat(0.25f), small, big));
}

// 1 - erf(a) for a >= 0: a rational form of degree 5 times e^(-a*a) (Abramowitz and Stegun 7.1.26 bounds it by 1.5e-7).
LZ_INLINE vf gelu_of(vf x) {
  vf a = vabs(x) * 0.707106781f;
  vf t = 1.0f / (1.0f + 0.3275911f * a);
  vf poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  vf tail = poly * vexp(-a * a);  // erfc(a)
  vf half = 0.5f * x * tail;
  return select(x >= splat(0.0f), x - half, select(x != x, x, half));
}

LZ_INLINE vf activate(vf x, int64_t act) {
  if (act == SILU) return x / (1.0f + vexp(-x));
  if (act == RELU) return select(x > splat(0.0f), x, select(x != x, x, splat(0.0f)));
  if (act == GELU) return gelu_of(x);
  if (act == GELU_TANH) return 0.5f * x * (1.0f + vtanh(0.797884561f * (x + 0.044715f * x * x * x)));
  return x;
}

struct Finish {
  const Tensor& bias;
  int64_t act;

  template <class T> void store_row(float* c, int64_t at, int cols, T* out) const {
    if (bias) {
      for (int j = 0; j < cols; ++j) {
        const int64_t from = (at + j) * bias.stride[0];
        c[j] += bias.dtype == F32 ? bias.as<float>()[from] : bias.dtype == BF16 ? to_float(bias.as<bf16>()[from]) : to_float(bias.as<f16>()[from]);
      }
    }
    int j = 0;
    for (; j + W <= cols; j += W) store(out + j, activate(load(c + j), act));
    if (j < cols) store_part(out + j, activate(load_part(c + j, cols - j), act), cols - j);
  }
};

// Rows that can be read in order; of an empty tensor nothing is read, whatever its strides.
LZ_INLINE bool readable(const Tensor& t) { return t.dense_rows() || t.count() == 0; }

inline Status check_linear(const Tensor& x, int64_t k, int64_t n, const Tensor& bias, const Tensor& out, int64_t act) {
  if (x.ndim < 1 || out.ndim != x.ndim || x.size(-1) != k || out.size(-1) != n) return "x must be [..., K] and out [..., N]";
  for (int i = 0; i + 1 < x.ndim; ++i)
    if (x.shape[i] != out.shape[i]) return "x and out must share their leading axes";
  if (out.dtype != x.dtype) return "x and out must share a dtype";
  if (bias && (bias.ndim != 1 || bias.size(0) != n || (bias.dtype != F32 && bias.dtype != BF16 && bias.dtype != F16)))
    return "bias must be floating, [N]";
  if (act < 0 || act >= ACTIVATIONS) return "unknown activation";
  return readable(x) && readable(out) ? nullptr : RELAYOUT;
}

}  // namespace LZ_ISA
}  // namespace lz
