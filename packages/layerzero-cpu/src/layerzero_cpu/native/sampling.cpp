// unit: portable avx2 avx512 neon
// One token a row of logits, without sorting the vocabulary. The kept tokens, their weights (in double) and the walk of the
// draw in the order of ids are those of the reference, so equal uniform numbers give equal tokens.
//
// The largest logit of every run of 64 is found first, in one pass. Tokens are ranked by logit, the lower id first among
// equals; every filter keeps a prefix of the ranking, so it is told by its last token, the cut, which is looked for among few
// candidates (nucleus.hpp).
//   top-k      a number that k of the runs' maxima reach is a floor: only runs that reach it can hold one of the k;
//   top-p      tokens so far below the head that all of them together weigh less than 1 − p cannot be in the nucleus; nor
//              can tokens below a floor above which there is mass enough;
//   otherwise  every token is weighed.
#include "nucleus.hpp"
#include "peaks.hpp"

LZ_BEGIN

namespace {

constexpr double SLACK = 1e-9;  // mass this close to p counts as reached

struct Row {
  const void* logits;
  int64_t vocab, runs;
  const float* peaks;  // of each run; NaN where a logit of it or of a neighbour is
  float head;
  int threads;         // more than one only where there is one row
  LZ_INLINE int64_t end_of(int64_t run) const { return (run + 1) * RUN < vocab ? (run + 1) * RUN : vocab; }
};

struct Filters {
  int64_t k;
  double p, least, temperature, inverse, uniform;
  bool use_k, use_p, use_least;
};

struct Memory {
  List list;         // candidates
  double* of_runs;   // masses
  Weighted* work;    // a copy to be reordered
  float* peaks;
};

// f(first index, how many, D weights) over the logits of a run.
template <class T, class F> LZ_INLINE void weigh(const T* x, int64_t begin, int64_t end, double head, double inverse, const F& f) {
  for (int64_t i = begin; i < end; i += W) {
    int64_t m = end - i < W ? end - i : W;
    vf v = m == W ? load(x + i) : load_part(x + i, m, -__builtin_inff());
    vd low, high;
    split(v, &low, &high);
    f(i, m < D ? m : D, weight(low, head, inverse));
    if (m > D) f(i + D, m - D, weight(high, head, inverse));
  }
}

template <class T> LZ_INLINE double run_mass(const Row& row, int64_t run, double inverse, double least) {
  vd sums = {};
  weigh(static_cast<const T*>(row.logits), run * RUN, row.end_of(run), double(row.head), inverse,
        [&](int64_t, int64_t, vd w) { sums += w >= least ? w : vd{}; });
  return sum(sums);
}

template <class T> LZ_INLINE double masses(const Row& row, double inverse, double least, double* of_runs) {
  int64_t pieces = row.runs / 128 + 1;
  parallel_parts(pieces, row.threads, [&](int64_t part) {
    for (int64_t run = row.runs * part / pieces; run < row.runs * (part + 1) / pieces; ++run)
      of_runs[run] = run_mass<T>(row, run, inverse, least);
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

// The drawn one of the candidates that do not rank behind the cut. Weights of the others become 0; the walk goes by runs.
int64_t draw(const Memory& m, Token cut, const Filters& f) {
  const List& list = m.list;
  double least = !f.use_least ? 0.0 : f.least > 1.0 ? 1.0 : f.least, total = 0.0;
  int64_t runs = (list.count + RUN - 1) / RUN;
  for (int64_t run = 0; run < runs; ++run) {
    double sum = 0.0;
    for (int64_t i = run * RUN; i < list.count && i < (run + 1) * RUN; ++i) {
      bool kept = (list.logits[i] > cut.logit) | ((list.logits[i] == cut.logit) & (list.ids[i] <= cut.id));
      double w = list.weights[i];
      list.weights[i] = w = kept & (w >= least) ? w : 0.0;
      sum += w;
    }
    m.of_runs[run] = sum;
    total += sum;
  }
  if (!(total > 0.0)) return -1;
  double target = target_of(f.uniform, total), before = 0.0;
  int64_t run = 0, last = -1;
  while (run + 1 < runs && !(before + m.of_runs[run] > target)) before += m.of_runs[run++];
  for (; run >= 0 && last < 0; --run)  // back only where rounding carried the walk past the last weight
    for (int64_t i = run * RUN; i < list.count && i < (run + 1) * RUN; ++i) {
      if (!(list.weights[i] > 0.0)) continue;
      before += list.weights[i], last = list.ids[i];
      if (before > target) return last;
    }
  return last;
}

// The tokens that reach the floor, in the order of ids.
template <class T> LZ_INLINE void candidates(const Row& row, float floor, List* list) {
  list->count = 0;
  for (int64_t run = 0; run < row.runs; ++run)
    if (row.peaks[run] >= floor) gather(static_cast<const T*>(row.logits), run * RUN, row.end_of(run), floor, list);
}

LZ_INLINE void weigh_all(const Row& row, double inverse, const List& list) {
  const double head = double(row.head);
  for (int64_t i = list.count; i < (list.count + W - 1) / W * W; ++i) list.logits[i] = row.head;
  for (int64_t i = 0; i < list.count; i += W) {
    vd low, high;
    split(load(list.logits + i), &low, &high);
    low = weight(low, head, inverse), high = weight(high, head, inverse);
    memcpy(list.weights + i, &low, sizeof low), memcpy(list.weights + i + D, &high, sizeof high);
  }
}

LZ_INLINE double mass_of(const List& list) {
  double sums[4] = {};
  for (int64_t i = 0; i < list.count; ++i) sums[i % 4] += list.weights[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The candidates of a nucleus of mass `goal`, weighed, and the floor they reach. Tokens below the lowest floor weigh, all of
// them together, less than half of what top-p leaves out; mostly the nucleus ends far above it, so higher floors are tried
// first: the tokens that reach one are enough where their mass reaches the goal.
template <class T> float nucleus_candidates(const Row& row, const Filters& f, double total, double goal, List* list) {
  const double head = double(row.head);
  double room = (1.0 - f.p) * total * 0.5 / double(row.vocab), down = 0.0;
  for (; room < 1.0 && down > -800.0; down -= 1.0) room *= 2.718281828459045;
  for (double tried = -4.0; tried - 2.0 > down; tried -= 4.0) {
    const float floor = below(head + f.temperature * tried);
    candidates<T>(row, floor, list);
    weigh_all(row, f.inverse, *list);
    if (mass_of(*list) >= goal + 1e-12 * total) return floor;
    if (list->count > row.vocab / 8) break;  // the next try would cost as much as the lowest floor
  }
  const float floor = below(head + f.temperature * down);
  candidates<T>(row, floor, list);
  weigh_all(row, f.inverse, *list);
  return floor;
}

template <class T> int64_t among_few(const Row& row, const Filters& f, const Memory& memory) {
  Memory m = memory;
  List& list = m.list;
  const bool cut_mass = f.use_p && f.p < 1.0;
  double goal = 0.0;
  float floor = -__builtin_inff();
  if (f.use_k) {
    if (f.k <= row.runs) floor = floor_of(row.peaks, row.runs, f.k, row.head);
    candidates<T>(row, floor, &list);
    if (list.count > f.k) keep_ranked(&list, f.k, m.work);
    weigh_all(row, f.inverse, list);
    if (cut_mass) goal = (f.p - SLACK) * mass_of(list);
  } else {
    double total = masses<T>(row, f.inverse, 0.0, m.of_runs);
    goal = (f.p - SLACK) * total;
    floor = nucleus_candidates<T>(row, f, total, goal, &list);
  }
  Token cut = {-__builtin_inff(), 0x7fffffff};
  if (cut_mass) cut = nucleus_of(list, goal, row.head, floor, m.work);
  return draw(m, cut, f);
}

template <class T> int64_t among_all(const Row& row, const Filters& f, const Memory& m) {
  double least = !f.use_least ? 0.0 : f.least > 1.0 ? 1.0 : f.least;
  double total = masses<T>(row, f.inverse, least, m.of_runs);
  if (!(total > 0.0)) return -1;
  double target = target_of(f.uniform, total), before = 0.0;
  int64_t run = 0;
  while (run + 1 < row.runs && !(before + m.of_runs[run] > target)) before += m.of_runs[run++];
  int64_t found = -1, last = -1;
  for (; run >= 0 && found < 0; --run) {  // back only where rounding carried the walk past the last weight
    weigh(static_cast<const T*>(row.logits), run * RUN, row.end_of(run), double(row.head), f.inverse,
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
  Row row = {logits, vocab, runs, m.peaks, head_of(m.peaks, runs), threads};
  if (!(row.head > -__builtin_inff())) return -1;  // a NaN, or nothing but -inf: there is no distribution
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
    char* memory = static_cast<char*>(scratch(room * (sizeof(Weighted) + 8 + 8) + runs * 12));
    if (memory == nullptr) {
      failed = "out of memory";
      return;
    }
    Memory m;
    m.work = reinterpret_cast<Weighted*>(memory);
    m.list.weights = reinterpret_cast<double*>(memory + room * sizeof(Weighted));
    m.of_runs = m.list.weights + room;
    m.list.logits = reinterpret_cast<float*>(m.of_runs + runs);
    m.list.ids = reinterpret_cast<int32_t*>(m.list.logits + room);
    m.list.count = 0;
    m.peaks = reinterpret_cast<float*>(m.list.ids + room);
    for (int64_t r = begin; r < end; ++r) {
      Filters f;
      f.k = ks ? int64_t(number(ks, r, 0.0)) : c.i(4);
      f.use_k = f.k > 0 && f.k < vocab;
      f.p = number(ps, r, c.f(6));
      f.use_p = ps || c.f(6) >= 0.0;
      f.least = number(leasts, r, c.f(8));
      f.use_least = leasts || c.f(8) >= 0.0;
      f.temperature = uniform ? number(temperatures, r, c.f(10)) : 0.0;
      double inverse = 1.0 / f.temperature;  // of the smallest temperatures not infinite: no distance stays none
      f.inverse = inverse < 1.7e308 ? inverse : 1.7e308;
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
