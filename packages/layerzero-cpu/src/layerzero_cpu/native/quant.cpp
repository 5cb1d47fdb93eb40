// unit: portable avx2 avx512 neon
// INT8, INT4 and FP8 codes of groups of numbers, and back. Numbers are divided by their scale, not multiplied by its
// inverse, and rounded to nearest even, so that the codes are the reference's.
#include "vec.hpp"

LZ_BEGIN

namespace {

constexpr int64_t GRAIN = 16 << 10;
constexpr float TINY = 1.17549435e-38f;  // no scale is subnormal

enum Format : int64_t { INT8, INT4, E4M3, E5M2 };

LZ_INLINE float largest_of(int64_t format) {
  return format == INT8 ? 127.0f : format == INT4 ? 7.0f : format == E4M3 ? 448.0f : 57344.0f;
}

struct Range {
  vf low = {}, high = {};  // of 0 and the numbers seen
  vi nan = {};
};

template <class T> LZ_INLINE void range_of(const T* x, int64_t n, float* low, float* high) {
  Range r;
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    vf v = load(x + i);
    r.low = vmin(v, r.low), r.high = vmax(v, r.high), r.nan |= (v != v);
  }
  if (i < n) {
    vf v = load_part(x + i, n - i);
    r.low = vmin(v, r.low), r.high = vmax(v, r.high), r.nan |= (v != v);
  }
  float a = 0.0f, b = 0.0f;
  bool bad = false;
  for (int lane = 0; lane < W; ++lane) {
    a = r.low[lane] < a ? r.low[lane] : a, b = r.high[lane] > b ? r.high[lane] : b, bad |= r.nan[lane] != 0;
  }
  *low = bad ? __builtin_nanf("") : a;
  *high = bad ? __builtin_nanf("") : b;
}

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

// Codes of W numbers in the low bits of each lane.
template <int F> LZ_INLINE vi encode(vf x, vf scale, float zero, bool affine) {
  vf v = x / scale;
  if (F == INT8 || F == INT4) {
    float largest = F == INT8 ? 127.0f : 7.0f;
    v = select(v != v, vf{}, v);
    if (!affine) {
      v = vmin(vmax(v, splat(-largest)), splat(largest));
      return __builtin_convertvector((v + 12582912.0f) - 12582912.0f, vi);
    }
    v = vmin(vmax(v, splat(-1024.0f)), splat(1024.0f));
    v = ((v + 12582912.0f) - 12582912.0f) + zero;
    return __builtin_convertvector(vmin(vmax(v, splat(-largest - 1.0f)), splat(largest)), vi);
  }
  // FP8: the wide number's bits, rounded at the place of the last kept bit; below the smallest normal the adder rounds.
  constexpr float top = F == E4M3 ? 448.0f : 57344.0f, least = F == E4M3 ? 0.015625f : 6.103515625e-05f;
  constexpr float magic = F == E4M3 ? 16384.0f : 128.0f;
  constexpr int cut = F == E4M3 ? 20 : 21, bias = F == E4M3 ? 120 << 3 : 112 << 2;
  vf m = vmin(vabs(v), splat(top));
  vu bits = bit_cast<vu>(m), sign = (bit_cast<vu>(v) >> 24) & 0x80u;
  vu normal = ((bits + ((1u << (cut - 1)) - 1u) + ((bits >> cut) & 1u)) >> cut) - uint32_t(bias);
  vu small = bit_cast<vu>(m + magic) - bit_cast<uint32_t>(magic);
  vu is_small = bit_cast<vu>(m < least), nan = bit_cast<vu>(v != v);
  vu code = (is_small & small) | (~is_small & normal);
  code = (nan & 0x7fu) | (~nan & code);
  return bit_cast<vi>(code | sign);
}

template <int F, class T>
LZ_INLINE void encode_run(const T* x, int64_t n, float scale, float zero, bool affine, uint8_t* out) {
  vf by = splat(scale);
  int64_t i = 0;
  for (; i < n; i += W) {
    int64_t m = n - i < W ? n - i : W;
    vf v = m == W ? load(x + i) : load_part(x + i, m);
    vi code = encode<F>(v, by, zero, affine);
    if (F == INT4) {
      alignas(64) int32_t lane[W];
      memcpy(lane, &code, sizeof lane);
      for (int64_t j = 0; j < m; j += 2)
        out[(i + j) / 2] = uint8_t((lane[j] & 15) | ((j + 1 < m ? lane[j + 1] & 15 : 0) << 4));
      continue;
    }
    vb narrow_ = __builtin_convertvector(code & 0xff, vb);
    if (m == W) memcpy(out + i, &narrow_, W);
    else memcpy(out + i, &narrow_, size_t(m));
  }
}

template <class T>
LZ_INLINE void encode_any(int64_t format, const T* x, int64_t n, float scale, float zero, bool affine, uint8_t* out) {
  switch (format) {
    case INT8: encode_run<INT8>(x, n, scale, zero, affine, out); break;
    case INT4: encode_run<INT4>(x, n, scale, zero, affine, out); break;
    case E4M3: encode_run<E4M3>(x, n, scale, zero, affine, out); break;
    default: encode_run<E5M2>(x, n, scale, zero, affine, out);
  }
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
          range_of(in + g * each, each, &low, &high);
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

// --- back ---------------------------------------------------------------------------------------------------------------
typedef uint8_t vub __attribute__((vector_size(LZ_LANES)));

template <int F> LZ_INLINE vf decode(const uint8_t* codes, int64_t i, int64_t m) {
  alignas(64) uint8_t lane[W] = {};
  if (F == INT4) {
    for (int64_t j = 0; j < m; ++j) {
      uint8_t byte = codes[(i + j) / 2];
      lane[j] = (i + j) & 1 ? byte >> 4 : byte & 15;
    }
  } else {
    memcpy(lane, codes + i, size_t(m));
  }
  vub b;
  memcpy(&b, lane, W);
  vu wide = __builtin_convertvector(b, vu);
  if (F == INT8) return __builtin_convertvector((bit_cast<vi>(wide) ^ 0x80) - 0x80, vf);
  if (F == INT4) return __builtin_convertvector((bit_cast<vi>(wide) ^ 8) - 8, vf);
  if (F == E5M2) return widen(__builtin_convertvector(wide << 8, vh), f16{});
  // E4M3 has fp16's layout but for the exponent's bias, 8 lower, and for its one NaN
  vf v = widen(__builtin_convertvector(((wide & 0x80u) << 8) | ((wide & 0x7fu) << 7), vh), f16{}) * 256.0f;
  vi nan = bit_cast<vi>(wide & 0x7fu) == 0x7f;
  return select(nan, splat(__builtin_nanf("")), v);
}

template <int F, class T>
LZ_INLINE void decode_run(const uint8_t* codes, int64_t n, float scale, float zero, T* out) {
  vf by = splat(scale), shift = splat(zero);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, (decode<F>(codes, i, W) - shift) * by);
  if (i < n) store_part(out + i, (decode<F>(codes, i, n - i) - shift) * by, n - i);
}

template <class T>
LZ_INLINE void decode_any(int64_t format, const uint8_t* codes, int64_t n, float scale, float zero, T* out) {
  switch (format) {
    case INT8: decode_run<INT8>(codes, n, scale, zero, out); break;
    case INT4: decode_run<INT4>(codes, n, scale, zero, out); break;
    case E4M3: decode_run<E4M3>(codes, n, scale, zero, out); break;
    default: decode_run<E5M2>(codes, n, scale, zero, out);
  }
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
