// Calls the kernels that go over rows with drawn numbers, once as `portable` and once as another instruction set compiled
// them, and compares: codes, tokens and streams must be equal, other results nearly so. A program of its own, so that it
// runs where no Python does, such as under an emulator of another processor.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "isa.hpp"

#ifndef LZ_OTHER
#define LZ_OTHER avx2
#endif
#define LZ_TABLES(isa)                                                                                   \
  namespace lz { namespace isa {                                                                         \
  extern const Kernel norm_exports[], norm_grad_exports[], rope_exports[], gated_exports[], sampling_exports[], quant_exports[]; \
  static const Kernel* const ALL[] = {norm_exports, norm_grad_exports, rope_exports, gated_exports, sampling_exports, quant_exports}; \
  }}
LZ_TABLES(portable)
LZ_TABLES(LZ_OTHER)

using namespace lz;

static uint64_t state = 88172645463325252ull;
static uint64_t drawn() { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; }
static int64_t below(int64_t n) { return int64_t(drawn() % uint64_t(n)); }
static double unit() { return double(drawn() >> 11) / 9007199254740992.0; }
static double normal() { return sqrt(-2 * log(unit() + 1e-300)) * cos(6.283185307179586 * unit()); }

static float of_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

struct Array {
  std::vector<char> room;
  std::vector<int64_t> shape, stride;
  DType dtype;
  Array(std::vector<int64_t> s, DType t) : shape(s), stride(s.size()), dtype(t) {
    int64_t n = 1;
    for (int i = int(s.size()) - 1; i >= 0; --i) stride[size_t(i)] = n, n *= s[size_t(i)];
    room.resize(size_t(n * size_of(t)) + 64);
  }
  int64_t count() const { return int64_t((room.size() - 64)) / size_of(dtype); }
  void set(int64_t i, float x) {
    char* p = room.data() + i * size_of(dtype);
    if (dtype == F32) memcpy(p, &x, 4);
    else if (dtype == BF16) {
      uint16_t h = uint16_t(x != x ? 0x7fc0 : (bits_of(x) + 0x7fff + (bits_of(x) >> 16 & 1)) >> 16);
      memcpy(p, &h, 2);
    } else {  // fp16: the numbers drawn are of its range, and cut to it
      uint16_t h = uint16_t((bits_of(x) >> 16 & 0x8000) | (fabsf(x) < 6.2e-5f ? 0 : (((bits_of(x) & 0x7fffffff) - 0x38000000) >> 13)));
      memcpy(p, &h, 2);
    }
  }
  float get(int64_t i) const {
    const char* p = room.data() + i * size_of(dtype);
    float x;
    uint16_t h;
    if (dtype == F32) return memcpy(&x, p, 4), x;
    memcpy(&h, p, 2);
    if (dtype == BF16) return of_bits(uint32_t(h) << 16);
    uint32_t rest = h & 0x7fff, sign = uint32_t(h & 0x8000) << 16;
    if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return rest < 0x400 ? (sign ? -1.0f : 1.0f) * float(rest) * 5.9604644775390625e-08f : of_bits(sign | ((rest << 13) + 0x38000000));
  }
  Array& fill(double scale, bool odd = false) {
    for (int64_t i = 0; i < count(); ++i) set(i, float(normal() * scale));
    if (odd && count() > 3) {
      set(below(count()), dtype == F16 ? 0.0f : 1e-40f);
      if (below(3) == 0) set(below(count()), of_bits(below(2) ? 0x7f800000 : 0xff800000));
      if (below(3) == 0) set(below(count()), NAN);
    }
    return *this;
  }
  Tensor view() { return Tensor{room.data(), shape.data(), stride.data(), int32_t(shape.size()), dtype}; }
};
static Tensor none() { return Tensor{nullptr, nullptr, nullptr, 0, NONE}; }

static Status run(const Kernel* const* all, const char* name, Arg* args, int n, int threads) {
  for (int u = 0; u < 6; ++u)
    for (const Kernel* k = all[u]; k->name; ++k)
      if (!strcmp(k->name, name)) {
        Call c = {args, n, threads};
        return k->run(c);
      }
  printf("no kernel %s\n", name), exit(2);
}

// Arguments by their order; tensors that are written exist twice.
struct Both {
  Arg one[16], two[16];
  int n = 0;
  Both& t(Tensor x) { one[n].t = two[n].t = x, ++n; return *this; }
  Both& w(Array& a, Array& b) { one[n].t = a.view(), two[n].t = b.view(), ++n; return *this; }
  Both& i(int64_t x) { one[n].i = two[n].i = x, ++n; return *this; }
  Both& f(double x) { one[n].f = two[n].f = x, ++n; return *this; }
  void go(const char* name) {
    Status p = run(portable::ALL, name, one, n, 1), q = run(LZ_OTHER::ALL, name, two, n, 1 + int(below(3)));
    if ((p == nullptr) != (q == nullptr)) printf("%s: %s, %s\n", name, p ? p : "done", q ? q : "done"), exit(1);
  }
};

static void same(const char* what, const Array& a, const Array& b) {
  if (memcmp(a.room.data(), b.room.data(), a.room.size() - 64)) printf("%s: not equal\n", what), exit(1);
}
static void near(const char* what, const Array& a, const Array& b, double of_float, double least = 1e-5) {
  double rel = a.dtype == F32 ? of_float : a.dtype == BF16 ? 0.0079 : 0.00098;
  for (int64_t i = 0; i < a.count(); ++i) {
    double x = a.get(i), y = b.get(i);
    if (x != x ? y != y : (x == y || fabs(x - y) <= least + rel * fabs(x))) continue;
    printf("%s: number %lld of %lld is %.9g, portable has %.9g\n", what, (long long)i, (long long)a.count(), y, x), exit(1);
  }
}

static const DType FLOATS[] = {F32, BF16, F16};
static const int64_t WIDTHS[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 257, 512, 1000};

static void norms() {
  DType d = FLOATS[below(3)], of_w = below(2) ? d : FLOATS[below(3)];
  int64_t rows = 1 + below(4), n = WIDTHS[below(22)];
  Array x({rows, n}, d), r({rows, n}, d), w({n}, of_w), b({n}, of_w);
  x.fill(2, true), r.fill(1, below(4) == 0), w.fill(1), b.fill(1);
  Tensor weight = below(5) ? w.view() : none(), bias = below(3) ? b.view() : none();
  Array o1({rows, n}, d), o2({rows, n}, d), s1({rows, n}, d), s2({rows, n}, d);
  double offset = below(3) ? 0.0 : 1.0;
  Both().t(x.view()).t(weight).f(offset).f(1e-6).w(o1, o2).go("rms_norm"), near("rms_norm", o1, o2, 3e-6);
  Both().t(x.view()).t(r.view()).t(weight).f(offset).f(1e-6).w(o1, o2).w(s1, s2).go("add_rms_norm");
  near("add_rms_norm", o1, o2, 3e-6);
  for (int64_t i = 0; i < s1.count(); ++i) {
    float p = s1.get(i), q = s2.get(i);
    if (p == p ? bits_of(p) != bits_of(q) : q == q) printf("stream: %.9g, portable has %.9g\n", q, p), exit(1);
  }
  if (n < 8) return;
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, x.get(i) + (below(2) ? 0.0f : 0.25f));
  Both().t(x.view()).t(weight).t(bias).f(1e-5).w(o1, o2).go("layer_norm"), near("layer_norm", o1, o2, 2e-5);
}

static void gates() {
  DType d = FLOATS[below(3)];
  int64_t rows = 1 + below(3), n = WIDTHS[below(22)];
  Array x({rows, 2 * n}, d), o1({rows, n}, d), o2({rows, n}, d);
  x.fill(below(2) ? 3 : 20, true);
  for (int64_t kind = 0; kind < 4; ++kind) {
    Both().t(x.view()).w(o1, o2).i(kind).go("gated");
    near("gated", o1, o2, 1e-5, 2e-4);  // 1 + erf loses what the product with a large number shows
  }
}

static void ropes() {
  DType d = FLOATS[below(3)], of_table = FLOATS[below(3)];
  int64_t dims[] = {4, 16, 32, 36, 64, 66, 96, 128, 192}, dim = dims[below(9)], h = 1 + below(dim / 2), seq = 1 + below(10);
  bool full = below(2), interleaved = below(2), back = below(3) == 0;
  int64_t axis = 1 + below(2), heads = 1 + below(4);
  std::vector<int64_t> shape = axis == 2 ? std::vector<int64_t>{2, heads, seq, dim} : std::vector<int64_t>{2, seq, heads, dim};
  Array q(shape, d), o1(shape, d), o2(shape, d);
  Array cos(full ? std::vector<int64_t>{1, seq + 2, 2 * h} : std::vector<int64_t>{seq + 2, h}, of_table), sin = cos;
  q.fill(1), cos.fill(0.7), sin.fill(0.7);
  Both().t(q.view()).t(none()).t(cos.view()).t(sin.view()).t(none()).w(o1, o2).t(none()).i(interleaved).i(axis).i(back).go("rope");
  near("rope", o1, o2, 1e-6);
}

static void samples() {
  DType d = FLOATS[below(3)];
  int64_t batch = 1 + below(2), vocab = below(2) ? 1 + below(300) : 1000 + below(9000);
  Array x({batch, vocab}, d), u({batch}, F64), i1({batch}, I64), i2({batch}, I64);
  x.fill(below(2) ? 3 : 0.5);
  if (below(3) == 0)
    for (int64_t i = 0; i < x.count(); ++i) x.set(i, rintf(x.get(i)));
  if (below(6) == 0) x.set(below(x.count()), INFINITY);
  if (below(3) == 0)
    for (int64_t i = 0; i < x.count(); i += 3) x.set(i, -INFINITY);
  for (int64_t i = 0; i < batch; ++i) {
    double at = unit();
    memcpy(u.room.data() + 8 * i, &at, 8);
  }
  int64_t ks[] = {-1, -1, 1, 5, 50, 3000};
  double ps[] = {-1, -1, 0.0, 0.3, 0.9, 0.999}, leasts[] = {-1, -1, 0.05}, warm[] = {1.0, 0.5, 2.0, 0.01, 1e-300};
  Both().t(x.view()).w(i1, i2).t(u.view()).t(none()).i(ks[below(6)]).t(none()).f(ps[below(6)]).t(none()).f(leasts[below(3)])
      .t(none()).f(warm[below(5)]).go("sample");
  same("sample", i1, i2);
}

static void codes() {
  DType d = FLOATS[below(3)];
  int64_t each = 2 * (1 + below(300)), groups = 1 + below(12), format = below(4);
  bool affine = format < 2 && below(2);
  Array x({groups, each}, d), c1({groups * each / (format == 1 ? 2 : 1)}, U8), c2 = c1, s1({groups}, F32), s2 = s1, z1({groups}, I32), z2 = z1;
  x.fill(d == F16 ? 1.0 : pow(2.0, double(below(200)) - 100), below(3) == 0);
  Both q;
  q.t(x.view()).w(c1, c2).w(s1, s2);
  (affine ? q.w(z1, z2) : q.t(none())).i(each).i(format).go("quantize");
  same("codes", c1, c2);
  for (int64_t g = 0; g < groups; ++g)
    if (s1.get(g) == s1.get(g) && bits_of(s1.get(g)) != bits_of(s2.get(g))) printf("scale: not equal\n"), exit(1);
  if (affine) same("zero points", z1, z2);
  Array o1({groups, each}, d), o2 = o1;
  Both back;
  back.t(c1.view()).t(s1.view());
  (affine ? back.t(z1.view()) : back.t(none())).w(o1, o2).i(each).i(format).go("dequantize");
  near("dequantize", o1, o2, 1e-7);
}

int main(int, char** given) {
  long rounds = given[1] ? atol(given[1]) : 200;
  for (long i = 0; i < rounds; ++i) norms(), gates(), ropes(), samples(), codes();
  printf("%ld rounds, none differs\n", rounds);
}
