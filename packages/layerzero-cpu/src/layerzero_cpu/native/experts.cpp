// unit: portable neon avx2 avx512
// Experts with plain weights, read once for all rows of an expert, as they lie: along the inputs, or along the outputs (the
// view of a transposed weight). `fixed` takes one way for any number of rows.
#include "experts.hpp"
#include "gemm_panel.hpp"
#include "gemm_rows.hpp"

LZ_BEGIN

// A strip of a weight stored [K, N]: turned into floats block by block, which all rows use while they lie in the first cache.
template <class T>
static void strip_columns(const float* x, int64_t x_step, int rows, const T* w, int64_t w_step, int cols, int64_t k, float* c) {
  constexpr int64_t DEEP = 128;
  alignas(64) float panel[DEEP * STRIP];
  if (k == 0) memset(c, 0, size_t(rows) * STRIP * sizeof(float));
  for (int64_t from = 0; from < k; from += DEEP) {
    const int64_t length = k - from < DEEP ? k - from : DEEP, whole = (length + 3) / 4 * 4;
    for (int64_t i = 0; i < length; ++i) {
      const T* row = w + (from + i) * w_step;
      if (from + i + 24 < k) __builtin_prefetch(row + 24 * w_step);
      if (cols == STRIP) {
        for (int j = 0; j < STRIP; j += W) store(panel + i * STRIP + j, load(row + j));
      } else {
        for (int j = 0; j < STRIP; ++j) panel[i * STRIP + j] = j < cols ? to_float(row[j]) : 0.0f;
      }
    }
    memset(panel + length * STRIP, 0, size_t((whole - length) * STRIP) * sizeof(float));
    multiply(x + from, x_step, panel, STRIP, c, STRIP, rows, STRIP, whole, from == 0);
  }
}

// The same of a weight stored [N, K], whose blocks are turned on the way: pays from this many rows on.
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
constexpr int TURNED_FROM = 12;
template <class T>
static void strip_turned(const float* x, int64_t x_step, int rows, const T* w, int64_t w_step, int cols, int64_t k, float* c) {
  constexpr int64_t DEEP = 128;
  alignas(64) float panel[DEEP * STRIP];
  for (int64_t from = 0; from < k; from += DEEP) {
    const int64_t length = k - from < DEEP ? k - from : DEEP, whole = (length + 3) / 4 * 4;
    for (int j = 0; j < STRIP; j += 4) {
      const T* row[4];
      for (int i = 0; i < 4; ++i) row[i] = w + (j + i < cols ? j + i : cols - 1) * w_step + from;
      for (int64_t at = 0; at < whole; at += 4) {
        float32x4_t v[4];
        if (at * int64_t(sizeof(T)) % 64 == 0 && from + DEEP + at < k)  // the next block comes while the rows use this one
          for (int i = 0; i < 4; ++i) __builtin_prefetch(row[i] + at + DEEP, 0, 2);
        for (int i = 0; i < 4; ++i) v[i] = bit_cast<float32x4_t>(length - at >= 4 ? load(row[i] + at) : load_edge(row[i] + at, length - at));
        const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(v[0], v[1])), b = vreinterpretq_f64_f32(vtrn2q_f32(v[0], v[1]));
        const float64x2_t d = vreinterpretq_f64_f32(vtrn1q_f32(v[2], v[3])), e = vreinterpretq_f64_f32(vtrn2q_f32(v[2], v[3]));
        float* to = panel + at * STRIP + j;
        vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(a, d)));
        vst1q_f32(to + STRIP, vreinterpretq_f32_f64(vtrn1q_f64(b, e)));
        vst1q_f32(to + 2 * STRIP, vreinterpretq_f32_f64(vtrn2q_f64(a, d)));
        vst1q_f32(to + 3 * STRIP, vreinterpretq_f32_f64(vtrn2q_f64(b, e)));
      }
    }
    multiply(x + from, x_step, panel, STRIP, c, STRIP, rows, STRIP, whole, from == 0);
  }
}
#endif

template <class T> struct PlainExperts {
  const Tensor& w;  // [E, N, K], either of the last two axes dense
  bool fixed;
  float* data;
  int64_t step;

  int64_t k() const { return w.size(2); }
  // A line between the rows: at distances of a power of two, few of them would fit the first cache together.
  int64_t row_step() const { return padded(k()) + 16; }
  size_t bytes(int64_t rows) const { return size_t(rows * row_step()) * sizeof(float); }
  void place(char* room, int64_t) { data = reinterpret_cast<float*>(room), step = row_step(); }
  static constexpr bool STRAIGHT = true;
  float* straight(int64_t row) const { return data + row * step; }
  template <class U> void fill(int64_t row, const U* from) const {
    if (from) widen_row(from, k(), data + row * step, 1.0f);
    else memset(data + row * step, 0, size_t(step) * sizeof(float));
  }
  void strip(int64_t expert, int64_t row, int rows, int64_t at, int cols, float* c) const {
    const T* weight = w.as<T>() + expert * w.step(0);
    const float* x = data + row * step;
    if (w.step(2) != 1 && k() > 1) return strip_columns(x, step, rows, weight + at * w.step(1), w.step(2), cols, k(), c);
#if LZ_LANES == 16 && !defined(LZ_ISA_portable)
    if (fixed || rows >= PACKED_FROM) return packed_strip<STRIP / W>(x, step, rows, weight + at * w.step(1), w.step(1), cols, false, k(), c);
#endif
#if defined(__aarch64__) && !defined(LZ_ISA_portable)
    if (!fixed && rows >= TURNED_FROM && k() > 0) return strip_turned(x, step, rows, weight + at * w.step(1), w.step(1), cols, k(), c);
#endif
    const Linear<T> linear = {x, step, weight, w.step(1)};
    const int64_t block = fixed ? 1024 : rows <= 4 ? k() : rows <= 16 ? 2048 : 1024;
    memset(c, 0, size_t(rows) * STRIP * sizeof(float));
    for (int64_t from = 0; from < k(); from += block) linear.add(0, rows, at, cols, from, k() - from < block ? k() - from : block, c);
  }
};

static_assert(STRIP == COLUMNS && MOST == MOST_ROWS, "the sums of a strip lie as those of linear");

template <class T> static Status run(const Experts& e, const Tensor& gate_up, const Tensor& down, bool fixed, int threads) {
  PlainExperts<T> in = {gate_up, fixed, nullptr, 0}, back = {down, fixed, nullptr, 0};
  return all_experts<T>(e, in, back, fixed && PACKED_FROM == 0 ? DOT_ROWS : 1, threads);
}

// Either of the last two axes dense.
static bool either_dense(const Tensor& w) { return w.count() == 0 || w.step(2) == 1 || w.size(2) == 1 || w.step(1) == 1; }

// x, gate_up, down, weights, ids, gate_up bias or None, down bias or None, out; activation, first id, alpha, limit (inf: none),
// interleaved, fixed
static Status moe(Call& call) {
  const Tensor &x = call.t(0), &gate_up = call.t(1), &down = call.t(2);
  if (gate_up.ndim != 3 || down.ndim != 3 || gate_up.dtype != x.dtype || down.dtype != x.dtype) return "weights must be [E, N, K] of x's dtype";
  if (gate_up.size(0) != down.size(0)) return "gate_up and down must hold as many experts";
  const int64_t inner = down.size(2);
  const Experts e = {x, call.t(3), call.t(4), call.t(5), call.t(6), call.t(7), down.size(0), down.size(1), inner, call.i(8), call.i(9),
                     float(call.f(10)), float(call.f(11)), gate_up.size(1) == 2 * inner, call.i(12) != 0};
  if (Status wrong = check_experts(e, gate_up.size(1), gate_up.size(2))) return wrong;
  if (!either_dense(gate_up) || !either_dense(down)) return RELAYOUT;
  LZ_FLOATS(x.dtype, return run<T>(e, gate_up, down, call.i(13) != 0, call.threads));
  return "moe takes float32, bfloat16 and float16";
}

LZ_EXPORTS(experts) = {{"moe", "TTTTTOOTiiffii", &moe}, {nullptr, nullptr, nullptr}};

LZ_END
