// unit: portable avx2 avx512 neon
// Gradients of the norms. Rows are cut into as many runs as the caller says; each run sums its own gradients of weight and
// bias, so that the result does not depend on threads.
#include "norm.hpp"

LZ_BEGIN

namespace {

// rms_norm_grad(grad, grad of the stream or None, x, float weight or None, number added, eps, dx, float dweight or None)
Status rms_norm_grad(Call& c) {
  const Tensor &g = c.t(0), &also = c.t(1), &x = c.t(2), &w = c.t(3), &dx = c.t(6), &dw = c.t(7);
  int64_t rows;
  if (Status why = rows_of(x, g, &rows)) return why;
  if (Status why = rows_of(x, dx, &rows)) return why;
  if (!x.contiguous() || !g.contiguous() || !dx.contiguous() || (w && !w.contiguous()) || (dw && !dw.contiguous()))
    return RELAYOUT;
  if (also && !also.contiguous()) return RELAYOUT;
  if (also && (!also.same_shape(x) || also.dtype != x.dtype)) return "the stream's gradient must be as x";
  int64_t n = x.size(-1);
  if (w && (w.ndim != 1 || w.size(0) != n || w.dtype != F32)) return "weight must be float32, one number a column";
  if (dw && (dw.ndim != 2 || dw.size(1) != n || dw.dtype != F32 || dw.size(0) < 1)) return "dweight must be [parts, n]";
  if (n == 0 || rows == 0) return nullptr;
  int64_t parts = dw ? dw.size(0) : (rows < 64 ? rows : 64);
  float offset = float(c.f(4)), eps = float(c.f(5));
  LZ_FLOATS(x.dtype, {
    parallel_parts(parts, c.threads, [&](int64_t part) {
      float* sums = dw ? dw.as<float>() + part * n : nullptr;
      if (sums) memset(sums, 0, size_t(n) * 4);
      for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
        const T *row = x.as<T>() + r * n, *grad = g.as<T>() + r * n, *more = also ? also.as<T>() + r * n : nullptr;
        const float* weight = w ? w.as<float>() : nullptr;
        T* to = dx.as<T>() + r * n;
        float scale = rms_scale(squares(row, n), n, eps);
        float dot = 0.0f;
        vf along = {};
        int64_t i = 0;
        for (; i + W <= n; i += W) {
          vf gw = load(grad + i);
          if (weight) gw = gw * (load(weight + i) + offset);
          along = fma(gw, load(row + i), along);
        }
        for (; i < n; ++i) dot += to_float(grad[i]) * (weight ? weight[i] + offset : 1.0f) * to_float(row[i]);
        dot = (dot + sum(along)) * scale * scale / float(n);
        for (i = 0; i + W <= n; i += W) {
          vf v = load(row + i), gv = load(grad + i), gw = gv;
          if (weight) gw = gw * (load(weight + i) + offset);
          vf d = (gw - v * dot) * scale;
          if (more) d = d + load(more + i);
          store(to + i, d);
          if (sums) store(sums + i, fma(gv, v * scale, load(sums + i)));
        }
        for (; i < n; ++i) {
          float v = to_float(row[i]), gv = to_float(grad[i]), gw = weight ? gv * (weight[i] + offset) : gv;
          float d = (gw - v * dot) * scale;
          if (more) d += to_float(more[i]);
          to[i] = From<T>::of(d);
          if (sums) sums[i] += gv * v * scale;
        }
      }
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

// layer_norm_grad(grad, x, float weight or None, eps, dx, float dweight [parts, n], float dbias [parts, n])
Status layer_norm_grad(Call& c) {
  const Tensor &g = c.t(0), &x = c.t(1), &w = c.t(2), &dx = c.t(4), &dw = c.t(5), &db = c.t(6);
  int64_t rows;
  if (Status why = rows_of(x, g, &rows)) return why;
  if (Status why = rows_of(x, dx, &rows)) return why;
  if (!x.contiguous() || !g.contiguous() || !dx.contiguous() || (w && !w.contiguous())) return RELAYOUT;
  if (!dw.contiguous() || !db.contiguous()) return RELAYOUT;
  int64_t n = x.size(-1);
  if (w && (w.ndim != 1 || w.size(0) != n || w.dtype != F32)) return "weight must be float32, one number a column";
  if (dw.ndim != 2 || dw.size(1) != n || dw.dtype != F32 || dw.size(0) < 1) return "dweight must be [parts, n]";
  if (!db.same_shape(dw) || db.dtype != F32) return "dbias must be as dweight";
  int64_t parts = dw.size(0);
  float eps = float(c.f(3));
  if (n == 0) return nullptr;
  LZ_FLOATS(x.dtype, {
    parallel_parts(parts, c.threads, [&](int64_t part) {
      float *sw = dw.as<float>() + part * n, *sb = db.as<float>() + part * n;
      memset(sw, 0, size_t(n) * 4);
      memset(sb, 0, size_t(n) * 4);
      const float* weight = w ? w.as<float>() : nullptr;
      for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
        const T *row = x.as<T>() + r * n, *grad = g.as<T>() + r * n;
        T* to = dx.as<T>() + r * n;
        float mean, scale, first = 0.0f, second = 0.0f;
        moments(row, n, eps, &mean, &scale);
        vf a = {}, b = {};
        int64_t i = 0;
        for (; i + W <= n; i += W) {
          vf gw = load(grad + i), h = (load(row + i) - mean) * scale;
          if (weight) gw = gw * load(weight + i);
          a += gw, b = fma(gw, h, b);
        }
        for (; i < n; ++i) {
          float gw = to_float(grad[i]) * (weight ? weight[i] : 1.0f);
          first += gw, second += gw * (to_float(row[i]) - mean) * scale;
        }
        first = (first + sum(a)) / float(n), second = (second + sum(b)) / float(n);
        for (i = 0; i + W <= n; i += W) {
          vf gv = load(grad + i), gw = gv, h = (load(row + i) - mean) * scale;
          if (weight) gw = gw * load(weight + i);
          store(to + i, (gw - first - h * second) * scale);
          store(sw + i, fma(gv, h, load(sw + i)));
          store(sb + i, load(sb + i) + gv);
        }
        for (; i < n; ++i) {
          float gv = to_float(grad[i]), gw = weight ? gv * weight[i] : gv, h = (to_float(row[i]) - mean) * scale;
          to[i] = From<T>::of((gw - first - h * second) * scale);
          sw[i] += gv * h, sb[i] += gv;
        }
      }
    });
    return nullptr;
  });
  return "dtype must be float32, bfloat16 or float16";
}

}  // namespace

LZ_EXPORTS(norm_grad) = {
    {"rms_norm_grad", "TOTOffTO", &rms_norm_grad},
    {"layer_norm_grad", "TTOfTTT", &layer_norm_grad},
    {nullptr, nullptr, nullptr},
};

LZ_END
