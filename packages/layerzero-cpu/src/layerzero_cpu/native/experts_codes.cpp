// unit: portable neon avx2 avx512
// Experts with INT8 and INT4 weights where the processor has no dot product of bytes.
#include "experts_codes.hpp"

LZ_BEGIN

static Status moe_quantized(Call& call) {
  return with_expert_codes(call, [&](const Experts& e, const ExpertCodes& gate_up, const ExpertCodes& down) -> Status {
    FloatCodes in = {gate_up, nullptr, 0}, back = {down, nullptr, 0};
    LZ_FLOATS(e.x.dtype, return all_experts<T>(e, in, back, 1, call.threads));
    return "x must be float32, bfloat16 or float16";
  });
}

LZ_EXPORTS(experts_codes) = {{"moe_quantized", EXPERT_CODES_SIGNATURE, &moe_quantized}, {nullptr, nullptr, nullptr}};

LZ_END
