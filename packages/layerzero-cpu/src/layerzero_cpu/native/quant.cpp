// unit: portable avx2 avx512 neon
// INT8, INT4 and FP8 codes of groups of numbers, and back: the scale of each group, and the work's division among threads.
#include "codes.hpp"

LZ_BEGIN

namespace {

constexpr int64_t GRAIN = 16 << 10;
constexpr float TINY = 1.17549435e-38f;  // no scale is subnormal

LZ_INLINE float at_least_tiny(float step) { return step == 0.0f ? 1.0f : step < TINY ? TINY : step; }

LZ_INLINE float nearest(float x) {  // ties to even; for |x| < 2^22
  return (x + 12582912.0f) - 12582912.0f;
}

LZ_INLINE void scale_of(float low, float high, int64_t format, bool affine, float* scale, int32_t* zero) {
  float largest = largest_of(format);
  if (!affine) {
    float peak = -low > high ? -low : high;
    if (low != low) peak = low;
    *scale = at_least_tiny(peak / largest);
    return;
  }
  float count = 2.0f * largest + 1.0f;
  *scale = at_least_tiny(high / count - low / count);
  float at = -largest - 1.0f - low / *scale;
  if (at != at) {
    *zero = 0;
    return;
  }
  at = at < -largest - 1.0f ? -largest - 1.0f : at > largest ? largest : at;
  *zero = int32_t(nearest(at));
}

constexpr int64_t MOST_RUNS = 256;

// quantize(x, codes, float scale of each group, int32 zero point of each group or None, numbers a group, format)
Status quantize(Call& c) {
  const Tensor &x = c.t(0), &codes = c.t(1), &scale = c.t(2), &zero = c.t(3);
  int64_t each = c.i(4), format = c.i(5), count = x.count(), groups = scale.count();
  if (!x.contiguous() || !codes.contiguous() || !scale.contiguous() || (zero && !zero.contiguous())) return RELAYOUT;
  if (format < INT8 || format > E5M2) return "no such format";
  bool packed = format == INT4, affine = bool(zero);
  if (size_of(codes.dtype) != 1 || codes.count() != (packed ? count / 2 : count)) return "codes must have a place each";
  if (packed && (each % 2 || count % 2)) return "two codes share a byte: groups must be even";
  if (scale.dtype != F32 || each < 0 || groups * each != count) return "one float32 scale a group";
  if (zero && (zero.dtype != I32 || zero.count() != groups || format > INT4)) return "one int32 zero point a group";
  float* scales = scale.as<float>();
  int32_t* zeros = zero ? zero.as<int32_t>() : nullptr;
  uint8_t* out = codes.as<uint8_t>();
  LZ_FLOATS(x.dtype, {
    const T* in = x.as<T>();
    if (groups >= 8 || count < 2 * GRAIN) {
      parallel_range(groups, each ? GRAIN / each + 1 : groups, c.threads, [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
          float low, high;
          int32_t at = 0;
          if (affine) range_of(in + g * each, each, &low, &high);
          else peak_of(in + g * each, each, &low, &high);
          scale_of(low, high, format, affine, scales + g, &at);
          if (zeros) zeros[g] = at;
          encode_any(format, in + g * each, each, scales[g], float(at), affine, out + (packed ? g * each / 2 : g * each));
        }
      });
      return nullptr;
    }
    for (int64_t g = 0; g < groups; ++g) {  // few long groups: the threads share each
      float lows[MOST_RUNS], highs[MOST_RUNS];
      int64_t runs = each / GRAIN < MOST_RUNS ? each / GRAIN + 1 : MOST_RUNS, step = (each / runs + 64) / 64 * 64;
      runs = (each + step - 1) / step;
      const T* from = in + g * each;
      parallel_parts(runs, c.threads, [&](int64_t run) {
        int64_t at = run * step, m = each - at < step ? each - at : step;
        range_of(from + at, m, lows + run, highs + run);
      });
      float low = 0.0f, high = 0.0f;
      for (int64_t run = 0; run < runs; ++run) {
        if (lows[run] != lows[run] || low != low) low = high = __builtin_nanf("");
        else low = lows[run] < low ? lows[run] : low, high = highs[run] > high ? highs[run] : high;
      }
      int32_t point = 0;
      scale_of(low, high, format, affine, scales + g, &point);
      if (zeros) zeros[g] = point;
      uint8_t* to = out + (packed ? g * each / 2 : g * each);
      parallel_parts(runs, c.threads, [&](int64_t run) {
        int64_t at = run * step, m = each - at < step ? each - at : step;
        encode_any(format, from + at, m, scales[g], float(point), affine, to + (packed ? at / 2 : at));
      });
    }
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

// dequantize(codes, float scale of each group, int32 zero point of each group or None, out, numbers a group, format)
Status dequantize(Call& c) {
  const Tensor &codes = c.t(0), &scale = c.t(1), &zero = c.t(2), &out = c.t(3);
  int64_t each = c.i(4), format = c.i(5), count = out.count(), groups = scale.count();
  if (!codes.contiguous() || !out.contiguous() || !scale.contiguous() || (zero && !zero.contiguous())) return RELAYOUT;
  if (format < INT8 || format > E5M2) return "no such format";
  bool packed = format == INT4;
  if (size_of(codes.dtype) != 1 || codes.count() != (packed ? count / 2 : count)) return "codes must have a place each";
  if (packed && (each % 2 || count % 2)) return "two codes share a byte: groups must be even";
  if (scale.dtype != F32 || each < 0 || groups * each != count) return "one float32 scale a group";
  if (zero && (zero.dtype != I32 || zero.count() != groups)) return "one int32 zero point a group";
  const float* scales = scale.as<float>();
  const int32_t* zeros = zero ? zero.as<int32_t>() : nullptr;
  const uint8_t* in = codes.as<uint8_t>();
  if (count == 0) return nullptr;
  int64_t run = each < GRAIN ? each : GRAIN / 2 * 2, runs = (each + run - 1) / run;
  LZ_FLOATS(out.dtype, {
    T* to = out.as<T>();
    parallel_range(groups * runs, GRAIN / run + 1, c.threads, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        int64_t g = item / runs, at = item % runs * run, m = each - at < run ? each - at : run, first = g * each + at;
        decode_any(format, in + (packed ? first / 2 : first), m, scales[g], zeros ? float(zeros[g]) : 0.0f, to + first);
      }
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

}  // namespace

LZ_EXPORTS(quant) = {
    {"quantize", "TTTOii", &quantize},
    {"dequantize", "TTOTii", &dequantize},
    {nullptr, nullptr, nullptr},
};

LZ_END
