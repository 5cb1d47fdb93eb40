// unit: portable avx2 avx512 neon
// RMSNorm, residual add + RMSNorm and LayerNorm. A row is summed, then written while it is still in
// the first cache. Sums are float, in an order that depends on the width alone.
#include "norm.hpp"

LZ_BEGIN

namespace {

// Pairs of vectors in one step of a row: all of them are read before any result is written. A store whose address ends like
// that of a later load (rows of 4096 numbers often lie so) would hold that load up until it is done.
#ifdef LZ_ROW_STEP
#elif defined(__aarch64__) && !defined(LZ_ISA_portable)
#define LZ_ROW_STEP 8
#else
#define LZ_ROW_STEP (LZ_LANES == 16 ? 4 : 2)
#endif

template <int PAIRS, class T, class U> LZ_INLINE void scale_some(const T* x, const U* w, vf by, T* out) {
  pair p[PAIRS];
  for (int u = 0; u < PAIRS; ++u) p[u] = load2(x + 2 * W * u) * by * load2(w + 2 * W * u);
  for (int u = 0; u < PAIRS; ++u) store2(out + 2 * W * u, p[u]);
}

// out = x * scale * (weight + offset); the wide products are rounded once. `ahead(i)` asks for what the next row needs at i:
// it comes while this one is computed.
template <class T, class U, class F>
LZ_INLINE void scaled(const T* x, const U* w, float offset, float scale, int64_t n, T* out, const F& ahead) {
  vf by = splat(scale), shift = splat(offset);
  int64_t i = 0;
  if (w == nullptr) {
    for (; i + 2 * W <= n; i += 2 * W) {
      ahead(i);
      store2(out + i, load2(x + i) * by);
    }
    for (; i + W <= n; i += W) store(out + i, load(x + i) * by);
    if (i < n) store_part(out + i, load_part(x + i, n - i) * by, n - i);
    return;
  }
  if (offset == 0.0f) {
    constexpr int STEP = LZ_ROW_STEP;
    for (; i + STEP * 2 * W <= n; i += STEP * 2 * W) {
      for (int u = 0; u < STEP; ++u) ahead(i + u * 2 * W);
      scale_some<STEP>(x + i, w + i, by, out + i);
    }
  }
  for (; i + 2 * W <= n; i += 2 * W) {
    pair p = load2(w + i);
    ahead(i);
    store2(out + i, load2(x + i) * by * pair{p.a + shift, p.b + shift});
  }
  for (; i + W <= n; i += W) store(out + i, load(x + i) * by * (load(w + i) + shift));
  if (i < n) store_part(out + i, load_part(x + i, n - i) * by * (load_part(w + i, n - i) + shift), n - i);
}

template <int PAIRS, class T> LZ_INLINE void add_some(const T* x, const T* residual, T* stream, T* out, Sums& s) {
  pair p[PAIRS];
  for (int u = 0; u < PAIRS; ++u) p[u] = load2(x + 2 * W * u) + load2(residual + 2 * W * u);
  for (int u = 0; u < PAIRS; ++u) {
    p[u] = store2_rounded(stream + 2 * W * u, p[u]);
    claim2(out + 2 * W * u);
  }
  for (int u = 0; u < PAIRS; u += 2) {
    s.a = fma(p[u].a, p[u].a, s.a), s.b = fma(p[u].b, p[u].b, s.b);
    s.c = fma(p[u + 1].a, p[u + 1].a, s.c), s.d = fma(p[u + 1].b, p[u + 1].b, s.d);
  }
}

// The sum is rounded to the stream's dtype before its squares are taken, and these are added as `squares` does: the pair
// equals the two ops apart.
template <class T> LZ_INLINE float added(const T* x, const T* residual, int64_t n, T* stream, T* out) {
  constexpr int STEP = LZ_ROW_STEP;
  Sums s;
  int64_t i = 0;
  for (; i + STEP * 2 * W <= n; i += STEP * 2 * W) add_some<STEP>(x + i, residual + i, stream + i, out + i, s);
  for (; i + 4 * W <= n; i += 4 * W) add_some<2>(x + i, residual + i, stream + i, out + i, s);
  for (; i + W <= n; i += W) {
    vf p = store_rounded(stream + i, load(x + i) + load(residual + i));
    s.a = fma(p, p, s.a);
  }
  if (i < n) {
    alignas(64) T last[W];
    vf p = store_rounded(last, load_part(x + i, n - i) + load_part(residual + i, n - i));
    memcpy(stream + i, last, size_t(n - i) * sizeof(T));
    s.b = fma(p, p, s.b);
  }
  return s.all();
}

// Weight and bias as the rows use them: their own dtype where it is that of x, else widened once into scratch memory, in the
// order of the pairs of x.
struct Vector {
  const void* own = nullptr;
  const float* wide = nullptr;
};

LZ_INLINE Status vector_of(const Tensor& t, DType rows, bool own, int64_t n, float* room, Vector* out) {
  if (!t) return nullptr;
  if (t.ndim != 1 || t.size(0) != n) return "weight and bias must have one number a column";
  if (own) {
    out->own = t.data;
    return nullptr;
  }
  if (room == nullptr) return "out of memory";
  out->wide = room;
  LZ_WEIGHTS(t.dtype, {
    if (rows == BF16) PairOrder<bf16>::widen(t.as<U>(), n, room);
    else PairOrder<float>::widen(t.as<U>(), n, room);
    return nullptr;
  });
  return "weight must be float32, bfloat16 or float16";
}

// rms_norm(x, weight or None, number added to the weight, eps, out)
Status rms_norm(Call& c) {
  const Tensor &x = c.t(0), &w = c.t(1), &out = c.t(4);
  int64_t rows;
  if (Status why = rows_of(x, out, &rows)) return why;
  int64_t n = x.size(-1);
  if (n == 0 || rows == 0) return nullptr;
  if (!x.dense_rows() || !out.dense_rows() || (w && !w.dense_rows())) return RELAYOUT;
  Vector weight;
  float* room = w && w.dtype != x.dtype ? static_cast<float*>(scratch(size_t(n) * 4)) : nullptr;
  if (Status why = vector_of(w, x.dtype, w.dtype == x.dtype, n, room, &weight)) return why;
  RowMap from(x), to(out);
  float offset = float(c.f(2)), eps = tamed(float(c.f(3)));
  LZ_FLOATS(x.dtype, {
    T *in = x.as<T>(), *result = out.as<T>();
    const T* own = static_cast<const T*>(weight.own);
    // by value: another thread reads what it needs from one place
    parallel_range(rows, 1 + GRAIN / n, c.threads, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T *row = in + from(r), *next = r + 1 < end ? in + from(r + 1) : row;
        T* made = result + to(r);
        auto ahead = [&](int64_t i) LZ_ALWAYS { fetch2(next + i); };
        float scale = rms_scale(squares(row, n, made), n, eps);
        if (weight.wide) scaled(row, weight.wide, offset, scale, n, made, ahead);
        else scaled(row, own, offset, scale, n, made, ahead);
      }
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

// add_rms_norm(x, residual, weight or None, number added to the weight, eps, out, stream)
Status add_rms_norm(Call& c) {
  const Tensor &x = c.t(0), &residual = c.t(1), &w = c.t(2), &out = c.t(5), &stream = c.t(6);
  int64_t rows;
  if (Status why = rows_of(x, out, &rows)) return why;
  if (Status why = rows_of(x, residual, &rows)) return why;
  if (Status why = rows_of(x, stream, &rows)) return why;
  int64_t n = x.size(-1);
  if (n == 0 || rows == 0) return nullptr;
  if (!x.dense_rows() || !out.dense_rows() || !residual.dense_rows() || !stream.dense_rows() ||
      (w && !w.dense_rows()))
    return RELAYOUT;
  Vector weight;
  float* room = w && w.dtype != x.dtype ? static_cast<float*>(scratch(size_t(n) * 4)) : nullptr;
  if (Status why = vector_of(w, x.dtype, w.dtype == x.dtype, n, room, &weight)) return why;
  RowMap from(x), along(residual), to(out), into(stream);
  float offset = float(c.f(3)), eps = tamed(float(c.f(4)));
  LZ_FLOATS(x.dtype, {
    const T *in = x.as<T>(), *base = residual.as<T>();
    T *result = out.as<T>(), *kept = stream.as<T>();
    const T* own = static_cast<const T*>(weight.own);
    parallel_range(rows, 1 + GRAIN / n, c.threads, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t after = r + 1 < end ? r + 1 : r;
        const T *x_row = in + from(r), *next = in + from(after), *beside = base + along(after);
        T *row = kept + into(r), *made = result + to(r);
        auto ahead = [&](int64_t i) LZ_ALWAYS { fetch2(next + i), fetch2(beside + i); };
        float scale = rms_scale(added(x_row, base + along(r), n, row, made), n, eps);
        if (weight.wide) scaled(row, weight.wide, offset, scale, n, made, ahead);
        else scaled(row, own, offset, scale, n, made, ahead);
      }
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

// (x - mean) * scale * weight + bias from number i on, a vector at a time.
template <class T, class U>
LZ_INLINE void centred_from(int64_t i, const T* x, const U* w, const U* b, float mean, float scale, int64_t n, T* out) {
  vf by = splat(scale), centre = splat(mean);
  for (; i + W <= n; i += W) {
    vf v = (load(x + i) - centre) * by;
    if (w) v = v * load(w + i);
    if (b) v = v + load(b + i);
    store(out + i, v);
  }
  if (i < n) {
    vf v = (load_part(x + i, n - i) - centre) * by;
    if (w) v = v * load_part(w + i, n - i);
    if (b) v = v + load_part(b + i, n - i);
    store_part(out + i, v, n - i);
  }
}

template <class T, class U>
LZ_INLINE void centred(const T* x, const U* w, const U* b, float mean, float scale, int64_t n, T* out, const T* next) {
  vf by = splat(scale), centre = splat(mean);
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    pair v = load2(x + i);
    fetch2(next + i);
    v.a = (v.a - centre) * by, v.b = (v.b - centre) * by;
    if (w) v = v * load2(w + i);
    if (b) v = v + load2(b + i);
    store2(out + i, v);
  }
  centred_from(i, x, w, b, mean, scale, n, out);
}

// layer_norm(x, weight or None, bias or None, eps, out)
Status layer_norm(Call& c) {
  const Tensor &x = c.t(0), &w = c.t(1), &b = c.t(2), &out = c.t(4);
  int64_t rows;
  if (Status why = rows_of(x, out, &rows)) return why;
  int64_t n = x.size(-1);
  if (n == 0 || rows == 0) return nullptr;
  if (!x.dense_rows() || !out.dense_rows() || (w && !w.dense_rows()) || (b && !b.dense_rows())) return RELAYOUT;
  Vector weight, bias;
  bool same = (!w || w.dtype == x.dtype) && (!b || b.dtype == x.dtype);
  float* room = same ? nullptr : static_cast<float*>(scratch(size_t(n) * 8));
  // both widened or none, so that one of two forms serves
  if (Status why = vector_of(w, x.dtype, same, n, room, &weight)) return why;
  if (Status why = vector_of(b, x.dtype, same, n, room ? room + n : nullptr, &bias)) return why;
  RowMap from(x), to(out);
  float eps = tamed(float(c.f(3)));
  LZ_FLOATS(x.dtype, {
    T *in = x.as<T>(), *result = out.as<T>();
    const T *own = static_cast<const T*>(weight.own), *add = static_cast<const T*>(bias.own);
    parallel_range(rows, 1 + GRAIN / n, c.threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T *row = in + from(r), *next = r + 1 < end ? in + from(r + 1) : row;
        T* made = result + to(r);
        float mean, scale;
        moments(row, n, eps, &mean, &scale, made);
        if (same) centred(row, own, add, mean, scale, n, made, next);
        else centred(row, weight.wide, bias.wide, mean, scale, n, made, next);
      }
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

}  // namespace

LZ_EXPORTS(norm) = {
    {"rms_norm", "TOffT", &rms_norm},
    {"add_rms_norm", "TTOffTT", &add_rms_norm},
    {"layer_norm", "TOOfT", &layer_norm},
    {nullptr, nullptr, nullptr},
};

LZ_END
