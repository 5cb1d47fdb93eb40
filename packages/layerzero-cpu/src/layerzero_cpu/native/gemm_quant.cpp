// unit: portable neon avx2 avx512
// Linear layers with INT8 and INT4 weights where the processor has no dot product of bytes.
#include "gemm_quant.hpp"

LZ_BEGIN

static Status linear_quantized(Call& call) {
  return with_quantized(call, [&](const Quantized& q) -> Status {
    LZ_FLOATS(q.x.dtype, return quantized_in_float<T>(q, call.threads));
    return "x must be float32, bfloat16 or float16";
  });
}

LZ_EXPORTS(gemm_quant) = {{"linear_quantized", QUANTIZED_SIGNATURE, &linear_quantized}, {nullptr, nullptr, nullptr}};

LZ_END
