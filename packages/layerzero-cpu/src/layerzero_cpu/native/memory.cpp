// unit: portable avx2 avx512 neon
// The floors a benchmark compares with: as many bytes copied, or read, by the same threads and nothing else.
#include "vec.hpp"

LZ_BEGIN

namespace {

// copied(from, to): tensors of equal shape whose rows are dense
Status copied(Call& c) {
  const Tensor &from = c.t(0), &to = c.t(1);
  if (!from.same_shape(to) || from.dtype != to.dtype || from.ndim == 0) return "tensors must be alike";
  if (!from.dense_rows() || !to.dense_rows()) return RELAYOUT;
  RowMap source(from), target(to);
  int64_t bytes = size_of(from.dtype), row = from.size(-1) * bytes, rows = from.rows();
  if (row == 0) return nullptr;
  parallel_range(rows, 1 + (32 << 10) / row, c.threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      memcpy(to.data + target(r) * bytes, from.data + source(r) * bytes, size_t(row));
  });
  return nullptr;
}

// read(from)
Status read_all(Call& c) {
  const Tensor& from = c.t(0);
  if (from.ndim == 0 || !from.dense_rows()) return RELAYOUT;
  RowMap source(from);
  int64_t bytes = size_of(from.dtype), row = from.size(-1) * bytes, rows = from.rows();
  if (row == 0) return nullptr;
  int64_t piece = row > (64 << 10) ? (64 << 10) : row, pieces = (row + piece - 1) / piece;
  parallel_range(rows * pieces, 1 + (32 << 10) / piece, c.threads, [&](int64_t begin, int64_t end) {
    vu a = {}, b = {}, d = {}, e = {};
    for (int64_t item = begin; item < end; ++item) {
      int64_t at = item % pieces * piece, n = row - at < piece ? row - at : piece;
      const char* p = from.data + source(item / pieces) * bytes + at;
      int64_t i = 0;
      for (; i + 16 * W <= n; i += 16 * W) {
        vu v[4];
        memcpy(v, p + i, sizeof v);
        a |= v[0], b |= v[1], d |= v[2], e |= v[3];
      }
    }
    a = (a | b) | (d | e);
    __asm__ volatile("" ::"r"(&a) : "memory");  // the sum is wanted, as far as the compiler knows
  });
  return nullptr;
}

}  // namespace

LZ_EXPORTS(memory) = {
    {"copied", "TT", &copied},
    {"read", "T", &read_all},
    {nullptr, nullptr, nullptr},
};

LZ_END
