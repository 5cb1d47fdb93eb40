// unit: dotprod avx512_bf16
// Linear layers with INT8 and INT4 weights by dot products of bytes. Each block of x becomes whole numbers, written in two
// or three balanced digits to base 256 (14 bits for bf16, 22 bits for the others), so that four products of a digit with a
// code are one instruction and exact; blocks are added in float. Rows with NaN or infinity take the float way.
#include "gemm_quant.hpp"

LZ_BEGIN

// Vectors of V bytes: the codes of a weight, and sums of four products. `OFF` is what was added to a code to make it
// unsigned, `GAIN` what it was multiplied by to stay in its half of the byte.
template <int V> struct Bytes;
#if defined(__aarch64__)
constexpr int WIDEST = 16;
template <> struct Bytes<16> {
  typedef int8x16_t codes;
  typedef int32x4_t sums;
  typedef float lanes __attribute__((vector_size(16)));
  typedef int32_t ints __attribute__((vector_size(16)));
  static constexpr float OFF8 = 0.0f, OFF4 = 0.0f, GAIN4 = 16.0f;
  static LZ_INLINE sums zero() { return vdupq_n_s32(0); }
  static LZ_INLINE sums dot(sums s, codes w, codes x) { return vdotq_s32(s, w, x); }
  static LZ_INLINE codes plain(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
  static LZ_INLINE codes whole(const void* p) { return plain(p); }
  static LZ_INLINE void halves(const void* p, codes& low, codes& high) {
    const codes b = plain(p);
    low = vshlq_n_s8(b, 4), high = vandq_s8(b, vdupq_n_s8(-16));
  }
};
#else
constexpr int WIDEST = 64;
#define LZ_BYTES(V, TYPE, P, SI)                                                                                     \
  template <> struct Bytes<V> {                                                                                      \
    typedef TYPE codes;                                                                                              \
    typedef TYPE sums;                                                                                               \
    typedef float lanes __attribute__((vector_size(V)));                                                             \
    typedef int32_t ints __attribute__((vector_size(V)));                                                            \
    static constexpr float OFF8 = 128.0f, OFF4 = 8.0f, GAIN4 = 1.0f;                                                 \
    static LZ_INLINE sums zero() { return P##setzero_##SI(); }                                                       \
    static LZ_INLINE sums dot(sums s, codes w, codes x) { return P##dpbusd_epi32(s, w, x); }                         \
    static LZ_INLINE codes plain(const void* p) { return P##loadu_##SI(static_cast<const TYPE*>(p)); }               \
    static LZ_INLINE codes whole(const void* p) { return P##xor_##SI(plain(p), P##set1_epi8(char(0x80))); }          \
    static LZ_INLINE void halves(const void* p, codes& low, codes& high) {                                           \
      const codes b = P##xor_##SI(plain(p), P##set1_epi8(char(0x88))), mask = P##set1_epi8(0x0f);                    \
      low = P##and_##SI(b, mask), high = P##and_##SI(P##srli_epi16(b, 4), mask);                                     \
    }                                                                                                                \
  };
LZ_BYTES(64, __m512i, _mm512_, si512)
LZ_BYTES(32, __m256i, _mm256_, si256)
LZ_BYTES(16, __m128i, _mm_, si128)
#undef LZ_BYTES
#endif

constexpr int MOST_BLOCK = 256;

// The rows of x as digits: digit d of row m, block b begins at data + ((m * ND + d) * blocks + b) * block.
struct Digits {
  int8_t* data;
  float *scale, *total;  // of each block of each row
  int64_t block, blocks, rows;
  int count;

  int64_t plane() const { return blocks * block; }
  size_t bytes() const { return size_t(rows * count * plane()) + size_t(rows * blocks) * 2 * sizeof(float) + 64; }
  void place(void* room) {
    scale = static_cast<float*>(room);
    total = scale + rows * blocks;
    data = reinterpret_cast<int8_t*>(total + rows * blocks);
  }
  // How far the largest number of a block stands above the others, over all blocks of a row; inf where not all are finite.
  template <class T> float crest(const T* x, int64_t k) const {
    float most = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) {
      alignas(64) float wide[MOST_BLOCK + W];
      const int64_t n = spread(x, k, b, wide);
      vf top = splat(0.0f), all = splat(0.0f);
      for (int64_t i = 0; i < block; i += W) top = vmax(vabs(load(wide + i)), top), all = all + vabs(load(wide + i));
      const float peak = max_of(top), mean = sum(all) / float(n);
      if (!(mean < __builtin_inff())) return __builtin_inff();
      if (peak > most * mean) most = peak / mean;
    }
    return most;
  }
  template <class T> int64_t spread(const T* x, int64_t k, int64_t b, float* wide) const {
    const int64_t n = k - b * block < block ? k - b * block : block;
    widen_row(x + b * block, n, wide, 1.0f);
    for (int64_t i = n; i < block + W; ++i) wide[i] = 0.0f;
    return n;
  }
  // One row. `group`: codes of a pair of vectors of halves, 0 for whole codes.
  template <class T> void fill(int64_t row, const T* x, int64_t k, int group) const {
    const float unit = count == 2 ? 8192.0f : 2097152.0f;  // twice that is what the digits hold
    for (int64_t b = 0; b < blocks; ++b) {
      alignas(64) float wide[MOST_BLOCK + W];
      int32_t whole[MOST_BLOCK + W];
      spread(x, k, b, wide);
      vf top = splat(0.0f);
      for (int64_t i = 0; i < block; i += W) top = vmax(vabs(load(wide + i)), top);
      float peak = max_of(top);
      if (peak < 1e-30f) peak = 1e-30f;
      // By a power of two: numbers of few bits then come out whole unless they are far below the largest.
      const float power = bit_cast<float>(bit_cast<uint32_t>(peak) & 0x7f800000u), inverse = unit / power;
      vi added = splat_i(0);
      for (int64_t i = 0; i < block; i += W) {
        const vi v = bit_cast<vi>(load(wide + i) * inverse + 12582912.0f) - 0x4b400000;
        memcpy(whole + i, &v, sizeof v);
        added = added + v;
      }
      int64_t all = 0;
      for (int i = 0; i < W; ++i) all += added[i];
      scale[row * blocks + b] = power / unit;
      total[row * blocks + b] = float(all) * (power / unit);
      int8_t* to = data + row * count * plane() + b * block;
      for (int64_t i = 0; i < block; ++i) {
        int64_t at = i;
        if (group) at = i / group * group + i % 2 * (group / 2) + i % group / 2;
        int32_t v = whole[i];
        for (int d = 0; d + 1 < count; ++d) {
          const int32_t digit = ((v + 128) & 255) - 128;
          to[d * plane() + at] = int8_t(digit);
          v = (v - digit) >> 8;
        }
        to[(count - 1) * plane() + at] = int8_t(v);
      }
    }
  }
};

template <int V> LZ_INLINE float sum_of(typename Bytes<V>::lanes v) {
  float t = 0.0f;
  for (int i = 0; i < V / 4; ++i) t += v[i];
  return t;
}

// One column of one row: the codes are a single stream, read in order. ND digits, vectors of V bytes, BITS of a code.
template <int ND, int V, int BITS> static float dot_column(const Quantized& q, const Digits& x, int64_t row, int64_t col) {
  typedef Bytes<V> B;
  typedef typename B::lanes lanes;
  typedef typename B::ints ints;
  constexpr int HALVES = BITS == 4 ? 2 : 1, CHAINS = V == 64 ? 2 : 4;  // sums of their own, to hide the latency
  constexpr float OFF = BITS == 4 ? B::OFF4 : B::OFF8, GAIN = BITS == 4 ? B::GAIN4 : 1.0f;
  const bool corrected = OFF != 0.0f || q.zero, single = q.block >= q.k;
  const float* scales = q.scale.as<float>() + (q.scale.ndim < 2 ? 0 : col * q.scale.step(0));
  const int64_t scale_step = q.scale.ndim < 2 || single ? 0 : q.scale.step(1);
  const int64_t bytes = x.block / HALVES, have = q.k / HALVES, plane = x.plane();
  const uint8_t* p = q.row(col);
  const int8_t* y = x.data + row * ND * plane;
  const float *x_scale = x.scale + row * x.blocks, *x_total = x.total + row * x.blocks;
  lanes total = {};
  float base = 0.0f;
  uint8_t edge[MOST_BLOCK];
  int64_t group = 0, inside = 0;  // the block of the weight, and how far we are in it
  for (int64_t b = 0; b < x.blocks; ++b, p += bytes, y += x.block) {
    const uint8_t* w = p;
    if ((b + 1) * bytes > have) {
      memset(edge, 0, size_t(bytes));
      memcpy(edge, p, size_t(have - b * bytes));
      w = edge;
    }
    typename B::sums s[CHAINS][ND];
    for (int u = 0; u < CHAINS; ++u)
      for (int d = 0; d < ND; ++d) s[u][d] = B::zero();
    auto add = [&](int64_t at, int u) __attribute__((always_inline)) {
      if constexpr (BITS == 4) {
        typename B::codes low, high;
        B::halves(w + at, low, high);
        for (int d = 0; d < ND; ++d) {
          s[u][d] = B::dot(s[u][d], low, B::plain(y + d * plane + at * 2));
          s[u + 1][d] = B::dot(s[u + 1][d], high, B::plain(y + d * plane + at * 2 + V));
        }
      } else {
        const typename B::codes whole = B::whole(w + at);
        for (int d = 0; d < ND; ++d) s[u][d] = B::dot(s[u][d], whole, B::plain(y + d * plane + at));
      }
    };
    constexpr int STEPS = CHAINS / HALVES;
    int64_t at = 0;
    for (; at + STEPS * V <= bytes; at += STEPS * V) {
      __builtin_prefetch(p + at + 1024);
      for (int u = 0; u < STEPS; ++u) add(at + u * V, u * HALVES);
    }
    for (; at < bytes; at += V) add(at, 0);
    ints sum[ND];
    for (int d = 0; d < ND; ++d) {
      sum[d] = bit_cast<ints>(s[0][d]);
      for (int u = 1; u < CHAINS; ++u) sum[d] = sum[d] + bit_cast<ints>(s[u][d]);
    }
    const float scale = scales[group * scale_step];
    lanes f = __builtin_convertvector(sum[1] * 256 + sum[0], lanes);
    if constexpr (ND == 3) f = f + __builtin_convertvector(sum[2], lanes) * 65536.0f;
    total = total + f * (scale * x_scale[b] * (1.0f / GAIN));
    if (corrected) base += scale * (OFF + (q.zero ? q.zero_at(col, group) : 0.0f)) * x_total[b];
    inside += x.block;
    if (inside >= q.block && !single) inside = 0, ++group;
  }
  return sum_of<V>(total) - base;
}

template <int ND, int V, int BITS> static void dot_all(const Quantized& q, const Digits& x, int threads) {
  const RowMap out_at(q.out);
  const Finish finish = {q.bias, q.act};
  parallel_parts((q.n + QUANT_COLS - 1) / QUANT_COLS, threads, [&](int64_t part) {
    alignas(64) float c[QUANT_COLS];
    const int64_t at = part * QUANT_COLS;
    const int cols = int(q.n - at < QUANT_COLS ? q.n - at : QUANT_COLS);
    for (int64_t row = 0; row < q.rows; ++row) {  // the codes of a part stay in the cache from row to row
      for (int j = 0; j < cols; ++j) c[j] = dot_column<ND, V, BITS>(q, x, row, at + j);
      LZ_FLOATS(q.out.dtype, finish.store_row(c, at, cols, q.out.as<T>() + out_at(row) + at));
    }
  });
}

template <int ND> static void dot_wide(const Quantized& q, const Digits& x, int width, int threads) {
#if !defined(__aarch64__)
  if (width == 64) return q.bits == 4 ? dot_all<ND, 64, 4>(q, x, threads) : dot_all<ND, 64, 8>(q, x, threads);
  if (width == 32) return q.bits == 4 ? dot_all<ND, 32, 4>(q, x, threads) : dot_all<ND, 32, 8>(q, x, threads);
#endif
  (void)width;
  return q.bits == 4 ? dot_all<ND, 16, 4>(q, x, threads) : dot_all<ND, 16, 8>(q, x, threads);
}

template <class T> static Status run(const Quantized& q, int threads) {
  // A block of x lies inside a block of the weight, and holds whole vectors of codes.
  const int64_t halves = q.bits == 4 ? 2 : 1;
  int64_t block = q.block <= MOST_BLOCK ? q.block : q.block == q.k || q.block % 256 == 0 ? 256 : q.block % 128 == 0 ? 128 : 0;
  if (q.block == q.k && block % (16 * halves)) block = block <= 128 ? 128 : 256;
  int width = WIDEST;
  while (width > 16 && block % (width * halves)) width /= 2;
  if (block == 0 || block % (width * halves)) return quantized_in_float<T>(q, threads);
  Digits x = {nullptr, nullptr, nullptr, block, (q.k + block - 1) / block, q.rows, 3};
  const RowMap x_at(q.x);
  float crest = 0.0f;
  for (int64_t m = 0; m < q.rows; ++m) {
    const float here = x.crest(q.x.as<T>() + x_at(m), q.k);
    if (here > crest) crest = here;
  }
  // Beside a number far above the rest of its block the others would keep too few digits: take more, or floats.
  if (!(crest <= (sizeof(T) == 4 ? 24.0f : 4096.0f))) return quantized_in_float<T>(q, threads);
  if (q.x.dtype == BF16 && crest <= 24.0f) x.count = 2;
  void* room = malloc(x.bytes());
  if (!room) return "no memory for the rows";
  x.place(room);
  for (int64_t m = 0; m < q.rows; ++m) x.fill(m, q.x.as<T>() + x_at(m), q.k, q.bits == 4 ? 2 * width : 0);
  if (x.count == 3) dot_wide<3>(q, x, width, threads);
  else dot_wide<2>(q, x, width, threads);
  free(room);
  return nullptr;
}

static Status linear_quantized(Call& call) {
  return with_quantized(call, [&](const Quantized& q) -> Status {
    LZ_FLOATS(q.x.dtype, return run<T>(q, call.threads));
    return "x must be float32, bfloat16 or float16";
  });
}

LZ_EXPORTS(gemm_quant_dot) = {{"linear_quantized", QUANTIZED_SIGNATURE, &linear_quantized}, {nullptr, nullptr, nullptr}};

LZ_END
