// The recurrences of linear attention and the convolution before them, for CPUs: float32, dense tensors, one state a head.
// No C++ library, no torch, no Python: functions in C that take addresses and sizes. Each is compiled for several
// instruction sets, and the loader of the machine takes the best (target_clones).
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int64_t WIDEST = 512;  // of keys, values and states; capabilities.json says the same
constexpr int64_t BLOCK = 32;    // columns whose sums stay in registers
constexpr int64_t TAPS = 8;      // of a convolution, at most
constexpr int64_t GROUP = 256;   // channels a thread takes: rows of a kilobyte where channels lie dense

// --- threads: torch's own, by GOMP_parallel; the items are taken one after the other by whoever is free ---------------
typedef void (*Team)(void (*)(void*), void*, unsigned, unsigned);

struct Work {
  void (*one)(const void* call, int64_t item);
  const void* call;
  int64_t items, next;
};

void take(void* given) {
  Work* work = static_cast<Work*>(given);
  for (;;) {
    int64_t item = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
    if (item >= work->items) return;
    work->one(work->call, item);
  }
}

void spread(void (*one)(const void*, int64_t), const void* call, int64_t items, int threads, void* team) {
  Work work = {one, call, items, 0};
  if (team == nullptr || threads <= 1 || items <= 1)
    take(&work);
  else
    reinterpret_cast<Team>(team)(take, &work, unsigned(threads < items ? threads : items), 0);
}

// exp in float32, to about one unit in the last place between e^-87 and e^88, where it stops.
INLINE float exponential(float x) {
  x = -87.0f > x ? -87.0f : x;  // as the instructions do it: what is no number stays none
  x = 88.0f < x ? 88.0f : x;
  const float whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest, without a branch
  const int32_t n = int32_t(whole);
  const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (n + 127) << 23;
  float two;
  __builtin_memcpy(&two, &bits, sizeof two);
  return p * two;
}

INLINE float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Where sequence n lies: its row, and its first and last token.
INLINE void span(const int64_t* cu, int64_t n, int64_t tokens, int64_t* row, int64_t* begin, int64_t* end) {
  *row = cu ? 0 : n;
  *begin = cu ? cu[n] : 0;
  *end = cu ? cu[n + 1] : tokens;
}

// --- the delta rules: S = decay S; u = beta (v - k S); S += k u; o = q S ----------------------------------------------
struct Delta {
  const float *q, *k, *v, *g, *beta, *first;
  float *out, *last;
  const int64_t* cu;
  int64_t tokens, key_heads, heads, width, values;
  float scale;
  int l2norm, channels;
};

INLINE void token(const Delta& c, int64_t row, int64_t t, int64_t h, const float* from, float* to) {
  const int64_t K = c.width, V = c.values, at = (row * c.tokens + t) * c.heads + h;
  const int64_t key_at = ((row * c.tokens + t) * c.key_heads + h / (c.heads / c.key_heads)) * K;
  const float *q = c.q + key_at, *k = c.k + key_at, *v = c.v + at * V;
  float *out = c.out + at * V, decay[WIDEST], a[WIDEST], b[WIDEST], u[WIDEST];
  float q_scale = c.scale, k_scale = 1;
  if (c.l2norm) {
    q_scale *= 1 / __builtin_sqrtf(dot(q, q, K) + 1e-6f);
    k_scale = 1 / __builtin_sqrtf(dot(k, k, K) + 1e-6f);
  }
#pragma omp simd
  for (int64_t i = 0; i < K; ++i) {
    decay[i] = exponential(c.channels ? c.g[at * K + i] : c.g[at]);
    a[i] = k[i] * k_scale;
    b[i] = q[i] * q_scale;
  }
  const float both = dot(a, b, K), beta = c.beta[at];
  // what the decayed state holds for the key and for the query, a block of columns at a time
  for (int64_t j = 0; j < V; j += BLOCK) {
    const int64_t n = V - j < BLOCK ? V - j : BLOCK;
    float held[BLOCK] = {0}, read[BLOCK] = {0};
    if (n == BLOCK) {
      for (int64_t i = 0; i < K; ++i) {
        const float *line = from + i * V + j, da = decay[i] * a[i], db = decay[i] * b[i];
#pragma omp simd
        for (int64_t m = 0; m < BLOCK; ++m) held[m] += da * line[m], read[m] += db * line[m];
      }
    } else {
      for (int64_t i = 0; i < K; ++i) {
        const float *line = from + i * V + j, da = decay[i] * a[i], db = decay[i] * b[i];
        for (int64_t m = 0; m < n; ++m) held[m] += da * line[m], read[m] += db * line[m];
      }
    }
    for (int64_t m = 0; m < n; ++m) {
      u[j + m] = beta * (v[j + m] - held[m]);
      out[j + m] = read[m] + both * u[j + m];
    }
  }
  for (int64_t i = 0; i < K; ++i) {
    const float *line = from + i * V, d = decay[i], w = a[i];
    float* next = to + i * V;
#pragma omp simd
    for (int64_t m = 0; m < V; ++m) next[m] = d * line[m] + w * u[m];
  }
}

CLONES void delta_item(const void* call, int64_t item) {
  const Delta& c = *static_cast<const Delta*>(call);
  const int64_t n = item / c.heads, h = item % c.heads, size = c.width * c.values;
  int64_t row, begin, end;
  span(c.cu, n, c.tokens, &row, &begin, &end);
  float* to = c.last + item * size;
  const float* from = to;
  if (c.first == nullptr)
    memset(to, 0, size_t(size) * sizeof(float));
  else if (begin == end)
    memcpy(to, c.first + item * size, size_t(size) * sizeof(float));
  else
    from = c.first + item * size;
  for (int64_t t = begin; t < end; ++t, from = to) token(c, row, t, h, from, to);
}

// --- Mamba-2: S = exp(step A) S + step x B; y = C S + D x -------------------------------------------------------------
struct Scan {
  const float *x, *step, *A, *B, *C, *D, *first;
  float *out, *last;
  const int64_t* cu;
  int64_t tokens, groups, heads, width, states;
};

CLONES void scan_item(const void* call, int64_t item) {
  const Scan& c = *static_cast<const Scan*>(call);
  const int64_t n = item / c.heads, h = item % c.heads, P = c.width, S = c.states, size = P * S;
  int64_t row, begin, end;
  span(c.cu, n, c.tokens, &row, &begin, &end);
  float* to = c.last + item * size;
  const float* from = to;
  if (c.first == nullptr)
    memset(to, 0, size_t(size) * sizeof(float));
  else if (begin == end)
    memcpy(to, c.first + item * size, size_t(size) * sizeof(float));
  else
    from = c.first + item * size;
  for (int64_t t = begin; t < end; ++t, from = to) {
    const int64_t at = (row * c.tokens + t) * c.heads + h;
    const int64_t group = ((row * c.tokens + t) * c.groups + h / (c.heads / c.groups)) * S;
    const float *x = c.x + at * P, *B = c.B + group, *C = c.C + group;
    const float step = c.step[at], decay = exponential(step * c.A[h]), skip = c.D ? c.D[h] : 0;
    for (int64_t p = 0; p < P; ++p) {
      const float *line = from + p * S, w = step * x[p];
      float *next = to + p * S, y = 0;
#pragma omp simd reduction(+ : y)
      for (int64_t s = 0; s < S; ++s) {
        const float made = decay * line[s] + w * B[s];
        next[s] = made;
        y += made * C[s];
      }
      c.out[at * P + p] = y + skip * x[p];
    }
  }
}

// --- causal convolution: as x lies, either a row of channels a token, or a row of tokens a channel --------------------
struct Conv {
  const float *x, *weight, *bias, *first;
  float *out, *last;
  const int64_t* cu;
  int64_t channels, tokens, taps, kept, row_step, channel_step, token_step;
  int silu, rows;
};

// Sums of n <= GROUP columns, through the activation where asked, to where they belong.
INLINE void finish(const float* sum, float* out, int64_t n, int silu) {
  if (silu) {
    float grown[GROUP];  // two loops: in one, the compiler branches on the bounds of the exponential
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) grown[i] = exponential(-sum[i]);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = sum[i] / (1 + grown[i]);
  } else {
    memcpy(out, sum, size_t(n) * sizeof(float));
  }
}

// One token and a state of S columns: the state is read once, and written a column further.
template <int W, int S>
INLINE void conv_step(const Conv& c, const float* x, int64_t n, int64_t d0, int64_t many, float* out) {
  const float *weight = c.weight + d0 * W, *first = c.first + (n * c.channels + d0) * S;
  float *last = c.last + (n * c.channels + d0) * S, sum[GROUP];
#pragma omp simd
  for (int64_t d = 0; d < many; ++d) {
    float made = (c.bias ? c.bias[d0 + d] : 0) + weight[d * W + W - 1] * x[d];
    for (int w = 0; w < W - 1; ++w) made += weight[d * W + w] * first[d * S + S - W + 1 + w];
    for (int s = 0; s < S - 1; ++s) last[d * S + s] = first[d * S + s + 1];
    last[d * S + S - 1] = x[d];
    sum[d] = made;
  }
  finish(sum, out, many, c.silu);
}

// A row of channels after the other; what is before the first of them is `past`. W is 0 for any number of taps.
template <int W>
INLINE void conv_rows(const Conv& c, const float* x, const float (*past)[GROUP], int64_t d0, int64_t many, int64_t begin,
                      int64_t end, float* out) {
  const int64_t taps = W ? W : c.taps;
  float weight[W ? W : TAPS][GROUP], bias[GROUP], sum[GROUP];
  for (int64_t d = 0; d < many; ++d) {
    bias[d] = c.bias ? c.bias[d0 + d] : 0;
    for (int64_t w = 0; w < taps; ++w) weight[w][d] = c.weight[(d0 + d) * taps + w];
  }
  for (int64_t t = begin; t < end; ++t, out += c.channels) {
    const float* row[W ? W : TAPS];
    for (int64_t w = 0; w < taps; ++w) {
      const int64_t at = t - taps + 1 + w;
      row[w] = at >= begin ? x + at * c.token_step : past[at - begin + taps - 1];
    }
#pragma omp simd
    for (int64_t d = 0; d < many; ++d) {
      float made = bias[d];
      for (int64_t w = 0; w < taps; ++w) made += weight[w][d] * row[w][d];
      sum[d] = made;
    }
    finish(sum, out, many, c.silu);
  }
}

// The tokens of one channel; the first of them see what was before.
template <int W>
INLINE void conv_line(const Conv& c, const float* line, const float* past, int64_t d, int64_t length, float* out) {
  const int64_t taps = W ? W : c.taps, before = taps - 1;
  const float *weight = c.weight + d * taps, bias = c.bias ? c.bias[d] : 0;
  float sum[GROUP], early[2 * TAPS];
  for (int64_t t = 0; t < length;) {
    const float* from = line + t - before;
    int64_t n = length - t < GROUP ? length - t : GROUP;
    if (t < before) {  // those whose window begins before the line
      n = n < before - t ? n : before - t;
      for (int64_t i = 0; i < 2 * before; ++i) early[i] = i < before ? past[i] : i - before < length ? line[i - before] : 0;
      from = early + t;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      float made = bias;
      for (int64_t w = 0; w < taps; ++w) made += weight[w] * from[i + w];
      sum[i] = made;
    }
    finish(sum, out + t, n, c.silu);
    t += n;
  }
}

template <int W>
INLINE void conv_taps(const Conv& c, int64_t item) {
  const int64_t D = c.channels, S = c.kept, groups = (D + GROUP - 1) / GROUP;
  const int64_t before = (W ? W : c.taps) - 1;
  const int64_t n = item / groups, d0 = item % groups * GROUP, many = D - d0 < GROUP ? D - d0 : GROUP;
  int64_t row, begin, end;
  span(c.cu, n, c.tokens, &row, &begin, &end);
  const int64_t length = end - begin;
  const float* x = c.x + row * c.row_step + d0 * c.channel_step;
  const float* first = c.first == nullptr ? nullptr : c.first + (n * D + d0) * S;
  if (c.rows) {
    float* out = c.out + (row * c.tokens + begin) * D + d0;
    const float* token = x + begin * c.token_step;
    if constexpr (W > 1) {
      if (length == 1 && first && S == W) return conv_step<W, W>(c, token, n, d0, many, out);
      if (length == 1 && first && S == before) return conv_step<W, W - 1>(c, token, n, d0, many, out);
    }
    float past[TAPS][GROUP];
    for (int64_t w = 0; w < before; ++w) {
      const int64_t at = S - before + w;
      for (int64_t d = 0; d < many; ++d) past[w][d] = first && at >= 0 ? first[d * S + at] : 0;
    }
    conv_rows<W>(c, x, past, d0, many, begin, end, out);
  } else {
    for (int64_t d = 0; d < many; ++d) {
      float past[TAPS];
      for (int64_t w = 0; w < before; ++w) {
        const int64_t at = S - before + w;
        past[w] = first && at >= 0 ? first[d * S + at] : 0;
      }
      float* out = c.out + (row * D + d0 + d) * c.tokens + begin;
      conv_line<W>(c, x + d * c.channel_step + begin, past, d0 + d, length, out);
    }
  }
  // the last columns of what was before and what came now
  const int64_t old = length < S ? S - length : 0;
  float* last = c.last + (n * D + d0) * S;
  for (int64_t s = 0; s < old; ++s)
    for (int64_t d = 0; d < many; ++d) last[d * S + s] = first ? first[d * S + length + s] : 0;
  for (int64_t s = old; s < S; ++s) {
    const float* line = x + (end + s - S) * c.token_step;
    for (int64_t d = 0; d < many; ++d) last[d * S + s] = line[d * c.channel_step];
  }
}

CLONES void conv_item(const void* call, int64_t item) {
  const Conv& c = *static_cast<const Conv*>(call);
  c.taps == 4 ? conv_taps<4>(c, item) : c.taps == 3 ? conv_taps<3>(c, item) : conv_taps<0>(c, item);
}

}  // namespace

EXPORT void lz_delta(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* first,
                     float* out, float* last, const int64_t* cu, int64_t count, int64_t tokens, int64_t key_heads,
                     int64_t heads, int64_t width, int64_t values, float scale, int l2norm, int channels, int threads,
                     void* team) {
  const Delta call = {q, k, v, g, beta, first, out, last, cu, tokens, key_heads, heads, width, values, scale, l2norm, channels};
  spread(delta_item, &call, count * heads, threads, team);
}

EXPORT void lz_scan(const float* x, const float* step, const float* A, const float* B, const float* C, const float* D,
                    const float* first, float* out, float* last, const int64_t* cu, int64_t count, int64_t tokens,
                    int64_t groups, int64_t heads, int64_t width, int64_t states, int threads, void* team) {
  const Scan call = {x, step, A, B, C, D, first, out, last, cu, tokens, groups, heads, width, states};
  spread(scan_item, &call, count * heads, threads, team);
}

EXPORT void lz_conv(const float* x, const float* weight, const float* bias, const float* first, float* out, float* last,
                    const int64_t* cu, int64_t count, int64_t channels, int64_t tokens, int64_t taps, int64_t kept,
                    int64_t row_step, int64_t channel_step, int64_t token_step, int silu, int rows, int threads,
                    void* team) {
  const Conv call = {x,    weight, bias, first,    out,          last,       cu,  channels, tokens,
                     taps, kept,   row_step, channel_step, token_step, silu, rows};
  spread(conv_item, &call, count * ((channels + GROUP - 1) / GROUP), threads, team);
}
