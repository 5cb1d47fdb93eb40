// What a kernel sees: its arguments, the thread pool, and how it is exported. No C++ library, no torch, no Python.
//
// Every file that says `// unit: ISA…` in its first line is compiled once for each of those instruction sets, in a
// namespace of its own. Such a file includes nothing but this header, vec.hpp, other headers of this folder and plain C
// headers: an inline function of the C++ library compiled with AVX-512 could be the copy that the linker keeps for all.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifndef LZ_ISA
#define LZ_ISA common
#endif

// Always inlined, so that no copy made for one instruction set can be called from the code of another.
#define LZ_INLINE inline __attribute__((always_inline))
#define LZ_ALWAYS __attribute__((always_inline))  // the same of a lambda

namespace lz {

enum DType : int32_t { NONE = 0, F32, BF16, F16, F64, I8, U8, I16, I32, I64, BOOL, F8E4M3, F8E5M2 };

LZ_INLINE constexpr int64_t size_of(DType t) {
  return t == F64 || t == I64 ? 8 : t == F32 || t == I32 ? 4 : t == BF16 || t == F16 || t == I16 ? 2 : 1;
}

// A view: strides in elements, memory owned by the caller. dtype NONE stands for an argument that was None.
struct Tensor {
  char* data;
  const int64_t* shape;
  const int64_t* stride;
  int32_t ndim;
  DType dtype;

  LZ_INLINE explicit operator bool() const { return dtype != NONE; }
  template <class T> LZ_INLINE T* as() const { return reinterpret_cast<T*>(data); }
  LZ_INLINE int64_t size(int axis) const { return shape[axis < 0 ? axis + ndim : axis]; }
  LZ_INLINE int64_t step(int axis) const { return stride[axis < 0 ? axis + ndim : axis]; }
  LZ_INLINE int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  // Rows over all axes but the last.
  LZ_INLINE int64_t rows() const {
    int64_t n = 1;
    for (int i = 0; i + 1 < ndim; ++i) n *= shape[i];
    return n;
  }
  // Last axis dense, or so short that its stride does not matter.
  LZ_INLINE bool dense_rows() const { return ndim == 0 || shape[ndim - 1] <= 1 || stride[ndim - 1] == 1; }
  LZ_INLINE bool contiguous() const {
    int64_t expect = 1;
    bool dense = true;
    for (int i = ndim - 1; i >= 0; --i) {
      if (shape[i] == 0) return true;  // of nothing the strides do not matter
      dense &= shape[i] == 1 || stride[i] == expect;
      expect *= shape[i];
    }
    return dense;
  }
  LZ_INLINE bool same_shape(const Tensor& o) const {
    if (ndim != o.ndim) return false;
    for (int i = 0; i < ndim; ++i)
      if (shape[i] != o.shape[i]) return false;
    return true;
  }
};

// Where row r of a tensor begins, in elements; one multiplication where the rows lie at equal distances.
struct RowMap {
  const int64_t* shape;
  const int64_t* stride;
  int64_t step;  // -1: not equal distances
  int32_t lead;

  LZ_INLINE explicit RowMap(const Tensor& t) : shape(t.shape), stride(t.stride), step(0), lead(t.ndim - 1) {
    int64_t span = 1;
    bool first = true;
    for (int i = lead - 1; i >= 0; --i) {
      if (shape[i] == 1) continue;
      if (first) {
        step = stride[i];
        span = shape[i] * step;
        first = false;
      } else if (stride[i] != span) {
        step = -1;
        return;
      } else {
        span *= shape[i];
      }
    }
    if (step < 0) step = -1;
  }
  LZ_INLINE int64_t operator()(int64_t r) const {
    if (step >= 0) return r * step;
    int64_t offset = 0;
    for (int i = lead - 1; i >= 0; --i) {
      offset += (r % shape[i]) * stride[i];
      r /= shape[i];
    }
    return offset;
  }
};

struct Arg {
  Tensor t;
  int64_t i;
  double f;
};

// One call of a kernel: its arguments in the order of its signature, and how many threads it may use.
struct Call {
  Arg* arg;
  int32_t count;
  int32_t threads;
  LZ_INLINE const Tensor& t(int n) const { return arg[n].t; }
  LZ_INLINE int64_t i(int n) const { return arg[n].i; }
  LZ_INLINE double f(int n) const { return arg[n].f; }
};

// nullptr: done. RELAYOUT: this kernel wants other strides (Python copies and calls again). Else: a message, the call
// was wrong; nothing was written.
typedef const char* Status;
extern const char RELAYOUT[];

// Signature, one letter an argument: T tensor, O tensor or None, i integer (or bool), f number.
struct Kernel {
  const char* name;
  const char* signature;
  Status (*run)(Call&);
};

// --- threads ------------------------------------------------------------------------------------------------------------
// Runs body(context, part) for part = 0 … parts-1, each once, on the caller and on workers, and returns when all are done.
// What a part computes must depend on its number only, never on the thread: then results are the same however many
// workers came to help, and `parts` alone (from Call::threads, or from the problem) decides them.
void parallel(int64_t parts, int threads, void (*body)(void* context, int64_t part), void* context);

// Have torch's own threads do it: GOMP_parallel of the OpenMP that torch runs on, or null for workers of ours.
void set_team(void* entry);

// Scratch memory of the calling thread, 64-byte aligned, kept between calls and grown when needed; not initialised.
// Each part of parallel() has its own thread's scratch; a second call on one thread invalidates the first's pointer.
void* scratch(size_t bytes);

namespace LZ_ISA {

// The same for a lambda: parallel_parts(parts, threads, [&](int64_t part) { … }).
template <class F> inline void parallel_parts(int64_t parts, int threads, const F& f) {
  if (parts <= 1 || threads <= 1) {
    for (int64_t p = 0; p < parts; ++p) f(p);
    return;
  }
  parallel(parts, threads, [](void* c, int64_t part) { (*static_cast<const F*>(c))(part); },
           const_cast<void*>(static_cast<const void*>(&f)));
}

// Cut `n` items into at most `threads` runs of at least `grain` items: f(begin, end).
template <class F> inline void parallel_range(int64_t n, int64_t grain, int threads, const F& f) {
  int64_t parts = grain > 0 ? (n + grain - 1) / grain : n;
  if (parts > threads) parts = threads;
  if (parts <= 1) {
    if (n > 0) f(int64_t(0), n);
    return;
  }
  parallel_parts(parts, threads, [=, &f](int64_t p) { f(n * p / parts, n * (p + 1) / parts); });
}

}  // namespace LZ_ISA
}  // namespace lz

// A unit begins its code with LZ_BEGIN and ends with LZ_END, and says between them what it exports:
//   LZ_EXPORTS(norm) = {{"rms_norm", "TOfT", &rms_norm}, …, {nullptr, nullptr, nullptr}};
// where `norm` is the name of the file. The table is plain data: no code runs when the library is loaded.
#define LZ_BEGIN namespace lz { namespace LZ_ISA {
#define LZ_END }}
#define LZ_EXPORTS(unit) extern const Kernel unit##_exports[]; const Kernel unit##_exports[]
