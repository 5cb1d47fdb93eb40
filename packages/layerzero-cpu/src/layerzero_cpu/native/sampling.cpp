// unit: portable avx2 avx512 neon
// One token a row of logits, without sorting the vocabulary. The kept tokens, their weights (in double) and the walk of the
// draw in the order of ids are those of the reference, so equal uniform numbers give equal tokens.
//
// The largest logit of every run of 64 is found first, in one pass. Tokens are ranked by logit, the lower id first among
// equals; every filter keeps a prefix of the ranking, so it is told by its last token, the cut, which is looked for by
// halving: in expectation each candidate is touched a few times.
//   top-k      the k-th largest of the runs' maxima is a floor: only runs that reach it can hold one of the k;
//   top-p      tokens so far below the head that all of them together weigh less than 1 − p cannot be in the nucleus;
//   otherwise  every token is weighed.
#include "sampling.hpp"

LZ_BEGIN

namespace {

constexpr int64_t RUN = 64;
constexpr double SLACK = 1e-9;  // mass this close to p counts as reached

struct Row {
  const void* logits;
  int64_t vocab, runs;
  const float* peaks;  // of each run; NaN where a logit of it is
  float head;
  int threads;         // more than one only where there is one row
  LZ_INLINE int64_t end_of(int64_t run) const { return (run + 1) * RUN < vocab ? (run + 1) * RUN : vocab; }
};

struct Filters {
  int64_t k;
  double p, least, temperature, uniform;
  bool use_k, use_p, use_least;
};

struct Memory {
  Token* list;       // candidates in the order of ids
  double* weights;   // theirs, or those of runs
  Weighted* work;    // a copy to be reordered
  float* peaks;
  float* floors;
};

template <class T> LZ_INLINE void peaks_of(const T* x, int64_t n, float* peaks) {
  for (int64_t run = 0; run * RUN < n; ++run) {
    const T* from = x + run * RUN;
    int64_t m = n - run * RUN < RUN ? n - run * RUN : RUN, i = 0;
    vf best = splat(-__builtin_inff());
    vi nan = {};
    for (; i + W <= m; i += W) {
      vf v = load(from + i);
      best = vmax(v, best), nan |= (v != v);
    }
    if (i < m) {
      vf v = load_part(from + i, m - i, -__builtin_inff());
      best = vmax(v, best), nan |= (v != v);
    }
    float top = max_of(best);
    int32_t any = 0;
    for (int lane = 0; lane < W; ++lane) any |= nan[lane];
    peaks[run] = any ? __builtin_nanf("") : top;
  }
}

// Tokens not below `floor`, in the order of ids; runs below it are not looked at.
template <class T> LZ_INLINE int64_t not_below(const Row& row, float floor, Token* out) {
  const T* x = static_cast<const T*>(row.logits);
  int64_t count = 0;
  for (int64_t run = 0; run < row.runs; ++run) {
    if (!(row.peaks[run] >= floor)) continue;
    for (int64_t i = run * RUN; i < row.end_of(run); ++i) {
      float v = to_float(x[i]);
      if (v >= floor) out[count++] = Token{v, int32_t(i)};
    }
  }
  return count;
}

// f(first index, how many, D weights) over the logits of a run.
template <class T, class F> LZ_INLINE void weigh(const T* x, int64_t begin, int64_t end, double head, double temperature, const F& f) {
  for (int64_t i = begin; i < end; i += W) {
    int64_t m = end - i < W ? end - i : W;
    vf v = m == W ? load(x + i) : load_part(x + i, m, -__builtin_inff());
    vd low, high;
    split(v, &low, &high);
    f(i, m < D ? m : D, weight(low, head, temperature));
    if (m > D) f(i + D, m - D, weight(high, head, temperature));
  }
}

template <class T> LZ_INLINE double run_mass(const Row& row, int64_t run, double temperature, double least) {
  vd sums = {};
  weigh(static_cast<const T*>(row.logits), run * RUN, row.end_of(run), double(row.head), temperature,
        [&](int64_t, int64_t, vd w) { sums += w >= least ? w : vd{}; });
  return sum(sums);
}

template <class T> LZ_INLINE double masses(const Row& row, double temperature, double least, double* of_runs) {
  int64_t pieces = row.runs / 128 + 1;
  parallel_parts(pieces, row.threads, [&](int64_t part) {
    for (int64_t run = row.runs * part / pieces; run < row.runs * (part + 1) / pieces; ++run)
      of_runs[run] = run_mass<T>(row, run, temperature, least);
  });
  double total = 0.0;
  for (int64_t run = 0; run < row.runs; ++run) total += of_runs[run];
  return total;
}

// Below the total, so that rounding never carries the walk past the last token.
LZ_INLINE double target_of(double uniform, double total) {
  double target = uniform * total, below = bit_cast<double>(bit_cast<int64_t>(total) - 1);
  return target < below ? target : below;
}

// The drawn one of the candidates that do not rank behind the cut.
int64_t draw(const Memory& m, int64_t count, Token cut, const Row& row, const Filters& f) {
  double total = 0.0;
  auto weight_at = [&](int64_t i) LZ_ALWAYS {
    if (ahead(cut, m.list[i])) return 0.0;
    double w = m.weights[i];
    return f.use_least && w < f.least && !(m.list[i].logit == row.head) ? 0.0 : w;
  };
  for (int64_t i = 0; i < count; ++i) total += weight_at(i);
  if (!(total > 0.0)) return -1;
  double target = target_of(f.uniform, total), sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    sum += weight_at(i);
    if (sum > target) return m.list[i].id;
  }
  return -1;
}

template <class T> int64_t among_few(const Row& row, const Filters& f, const Memory& m) {
  double total = 0.0, head = double(row.head);
  float floor = -__builtin_inff();
  if (f.use_k) {
    if (f.k <= row.runs) {
      memcpy(m.floors, row.peaks, size_t(row.runs) * 4);
      floor = kth_largest(m.floors, row.runs, f.k);
    }
  } else {
    total = masses<T>(row, f.temperature, 0.0, m.weights);
    // all tokens below the floor together weigh less than half of what top-p leaves out
    double room = (1.0 - f.p) * total * 0.5 / double(row.vocab), down = 0.0;
    for (; room < 1.0 && down > -800.0; down -= 1.0) room *= 2.718281828459045;
    floor = below(head + f.temperature * down);
  }
  int64_t count = not_below<T>(row, floor, m.list);
  Token cut = {-__builtin_inff(), 0x7fffffff};
  if (f.use_k && count > f.k) {
    for (int64_t i = 0; i < count; ++i) m.work[i] = Weighted{m.list[i], 0.0};
    cut = kth_ranked(m.work, count, f.k);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i)
      if (!ahead(cut, m.list[i])) m.list[kept++] = m.list[i];
    count = kept;
  }
  for (int64_t i = 0; i < count; i += D) {
    int64_t many = count - i < D ? count - i : D;
    vd v = {};
    for (int64_t j = 0; j < many; ++j) v[j] = double(m.list[i + j].logit);
    vd w = weight(v, head, f.temperature);
    for (int64_t j = 0; j < many; ++j) m.weights[i + j] = w[j];
  }
  if (f.use_p && f.p < 1.0) {
    if (f.use_k) {
      total = 0.0;
      for (int64_t i = 0; i < count; ++i) total += m.weights[i];
    }
    for (int64_t i = 0; i < count; ++i) m.work[i] = Weighted{m.list[i], m.weights[i]};
    cut = nucleus_end(m.work, count, (f.p - SLACK) * total);
  }
  return draw(m, count, cut, row, f);
}

template <class T> int64_t among_all(const Row& row, const Filters& f, const Memory& m) {
  double least = !f.use_least ? 0.0 : f.least > 1.0 ? 1.0 : f.least;
  double total = masses<T>(row, f.temperature, least, m.weights);
  if (!(total > 0.0)) return -1;
  double target = target_of(f.uniform, total), before = 0.0;
  int64_t run = 0;
  while (run + 1 < row.runs && !(before + m.weights[run] > target)) before += m.weights[run++];
  int64_t found = -1, last = -1;
  for (; run >= 0 && found < 0; --run) {  // back only where rounding carried the walk past the last weight
    weigh(static_cast<const T*>(row.logits), run * RUN, row.end_of(run), double(row.head), f.temperature,
          [&](int64_t i, int64_t many, vd w) {
            for (int64_t j = 0; j < many; ++j) {
              if (w[j] < least || w[j] <= 0.0) continue;
              before += w[j];
              last = i + j;
              if (found < 0 && before > target) found = i + j;
            }
          });
    if (last >= 0) break;
  }
  return found >= 0 ? found : last;
}

template <class T> int64_t greedy(const Row& row) {
  const T* x = static_cast<const T*>(row.logits);
  for (int64_t run = 0; run < row.runs; ++run) {
    if (row.peaks[run] != row.head) continue;
    for (int64_t i = run * RUN; i < row.end_of(run); ++i)
      if (to_float(x[i]) == row.head) return i;
  }
  return -1;
}

template <class T> int64_t sample_row(const T* logits, int64_t vocab, const Filters& f, const Memory& m, int threads) {
  int64_t runs = (vocab + RUN - 1) / RUN, pieces = runs / 256 + 1;
  parallel_parts(pieces, threads, [&](int64_t part) {
    int64_t first = runs * part / pieces, last = runs * (part + 1) / pieces;
    peaks_of(logits + first * RUN, (last * RUN < vocab ? last * RUN : vocab) - first * RUN, m.peaks + first);
  });
  Row row = {logits, vocab, runs, m.peaks, -__builtin_inff(), threads};
  for (int64_t run = 0; run < runs; ++run) {
    if (m.peaks[run] != m.peaks[run]) return -1;  // a NaN: there is no distribution
    row.head = m.peaks[run] > row.head ? m.peaks[run] : row.head;
  }
  if (row.head == -__builtin_inff()) return -1;
  if (!(f.temperature > 0.0)) return greedy<T>(row);
  if (f.use_k || (f.use_p && f.p < 1.0)) return among_few<T>(row, f, m);
  return among_all<T>(row, f, m);
}

LZ_INLINE double number(const Tensor& rows, int64_t r, double otherwise) {
  if (!rows) return otherwise;
  int64_t at = r * rows.step(0);
  switch (rows.dtype) {
    case F64: return rows.as<double>()[at];
    case F32: return double(rows.as<float>()[at]);
    case I64: return double(rows.as<int64_t>()[at]);
    case I32: return double(rows.as<int32_t>()[at]);
    case BF16: return double(to_float(rows.as<bf16>()[at]));
    case F16: return double(to_float(rows.as<f16>()[at]));
    default: return otherwise;
  }
}

// sample(logits [B, V], ids [B] int64, float64 uniform [B] or None, k rows or None, k, p rows or None, p, min-p rows or
//   None, min-p, temperature rows or None, temperature). Negative numbers: no such filter. No uniform: greedy.
Status sample(Call& c) {
  const Tensor &logits = c.t(0), &out = c.t(1), &uniform = c.t(2);
  const Tensor &ks = c.t(3), &ps = c.t(5), &leasts = c.t(7), &temperatures = c.t(9);
  if (logits.ndim != 2) return "logits must be [B, V]";
  int64_t batch = logits.size(0), vocab = logits.size(1), step = logits.step(0);
  if (logits.count() != 0 && !logits.dense_rows()) return RELAYOUT;
  if (vocab < 1 || vocab > 0x7ffffff0) return "the vocabulary is empty or too large";
  if (out.ndim != 1 || out.size(0) != batch || out.dtype != I64 || !out.contiguous()) return "ids must be int64 [B]";
  if (uniform && (uniform.count() != batch || uniform.dtype != F64 || !uniform.contiguous()))
    return "uniform numbers must be float64 [B]";
  const Tensor* params[] = {&ks, &ps, &leasts, &temperatures};
  for (const Tensor* t : params)
    if (*t && (t->ndim != 1 || t->size(0) != batch || size_of(t->dtype) < 2 || t->dtype == I16))
      return "a parameter must be a number or [B]";
  if (logits.dtype != F32 && logits.dtype != BF16 && logits.dtype != F16)
    return "dtype must be float32, bfloat16 or float16";
  size_t room = size_t(vocab + 64), runs = room / RUN + 2;
  const char* volatile failed = nullptr;
  int inside = batch == 1 ? c.threads : 1;
  parallel_range(batch, 1, c.threads, [&](int64_t begin, int64_t end) {
    char* memory = static_cast<char*>(scratch(room * (sizeof(Weighted) + 8 + sizeof(Token)) + runs * 8));
    if (memory == nullptr) {
      failed = "out of memory";
      return;
    }
    Memory m;
    m.work = reinterpret_cast<Weighted*>(memory);
    m.weights = reinterpret_cast<double*>(memory + room * sizeof(Weighted));
    m.list = reinterpret_cast<Token*>(m.weights + room);
    m.peaks = reinterpret_cast<float*>(m.list + room);
    m.floors = m.peaks + runs;
    for (int64_t r = begin; r < end; ++r) {
      Filters f;
      f.k = ks ? int64_t(number(ks, r, 0.0)) : c.i(4);
      f.use_k = f.k > 0 && f.k < vocab;
      f.p = number(ps, r, c.f(6));
      f.use_p = ps || c.f(6) >= 0.0;
      f.least = number(leasts, r, c.f(8));
      f.use_least = leasts || c.f(8) >= 0.0;
      f.temperature = uniform ? number(temperatures, r, c.f(10)) : 0.0;
      f.uniform = uniform ? uniform.as<double>()[r] : 0.0;
      const char* row = logits.data + r * step * size_of(logits.dtype);
      int64_t* to = out.as<int64_t>() + r;
      LZ_FLOATS(logits.dtype, { *to = sample_row(reinterpret_cast<const T*>(row), vocab, f, m, inside); });
    }
  });
  return failed;
}

}  // namespace

LZ_EXPORTS(sampling) = {
    {"sample", "TTOOiOfOfOf", &sample},
    {nullptr, nullptr, nullptr},
};

LZ_END
