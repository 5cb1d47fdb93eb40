// unit: amx
// Linear layers with INT8 and INT4 weights on tiles, for two rows and more. Codes become bf16 in registers, without error, on
// their way into a panel; sums are scaled block by block in float. One row goes to the dot products of bytes.
#include "amx_codes.hpp"

namespace lz {
namespace avx512_vnni {
extern const Kernel gemm_quant_dot_exports[];  // for one row, and for what tiles cannot take
}
}  // namespace lz

LZ_BEGIN

template <class T> static void sum_rows(const Quantized& q, int64_t step, float* sums) {
  const RowMap x_at(q.x);
  memset(sums, 0, size_t(q.blocks * step) * sizeof(float));
  for (int64_t m = 0; m < q.rows; ++m) {
    const T* x = q.x.as<T>() + x_at(m);
    for (int64_t b = 0; b < q.blocks; ++b) {
      const int64_t begin = b * q.block, end = begin + q.block < q.k ? begin + q.block : q.k;
      vf total = splat(0.0f);
      int64_t i = begin;
      for (; i + W <= end; i += W) total = total + load(x + i);
      float all = sum(total);
      for (; i < end; ++i) all += to_float(x[i]);
      sums[b * step + m] = all;
    }
  }
}

template <class T> static Status run(const Quantized& q, int steps, int threads) {
  const PairedRows x(q.rows, q.k, Terms<T>::COUNT);
  const int64_t sums_step = x.blocks * 16;
  float* sums = q.zero ? static_cast<float*>(malloc(size_t(q.blocks * sums_step) * sizeof(float) + 64)) : nullptr;
  if (!x.memory || (q.zero && !sums)) {
    free(sums);
    return "no memory for the rows";
  }
  const RowMap x_at(q.x);
  parallel_parts(x.blocks, threads, [&](int64_t block) { x.fill<T>(q.x, x_at, q.rows, q.k, block); });
  if (sums) sum_rows<T>(q, sums_step, sums);
  if (q.bits == 8) panel_product<T>(CodeWeight<8>{q, sums, sums_step, steps, {}}, x, q.rows, q.n, q.bias, q.act, q.out, threads);
  else panel_product<T>(CodeWeight<4>{q, sums, sums_step, steps, {}}, x, q.rows, q.n, q.bias, q.act, q.out, threads);
  free(sums);
  return nullptr;
}

static Status linear_quantized(Call& call) {
  if (call.t(0).rows() < 2) return avx512_vnni::gemm_quant_dot_exports[0].run(call);
  return with_quantized(call, [&](const Quantized& q) -> Status {
    const int steps = panel_steps(q);
    // A tile adds up one number after the other: too coarse for float32, whose results are held to its own precision.
    if (steps == 0 || q.x.dtype == F32) return avx512_vnni::gemm_quant_dot_exports[0].run(call);
    if (q.x.dtype == BF16) return run<bf16>(q, steps, call.threads);
    if (q.x.dtype == F16) return run<f16>(q, steps, call.threads);
    return "x must be float32, bfloat16 or float16";
  });
}

LZ_EXPORTS(amx_quant) = {{"linear_quantized", QUANTIZED_SIGNATURE, &linear_quantized}, {nullptr, nullptr, nullptr}};

LZ_END
