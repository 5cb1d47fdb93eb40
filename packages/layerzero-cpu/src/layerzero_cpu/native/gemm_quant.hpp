// Linear layers with INT8 and INT4 weights, in float: codes are widened in registers, each block's sum is scaled once.
// A zero point comes in after the sum, by the sum of the block's x: (code - zero) * x = code * x - zero * x.
#pragma once
#include "gemm_finish.hpp"

namespace lz {
namespace LZ_ISA {

constexpr int QUANT_COLS = 32;   // columns of one part
constexpr int QUANT_ROWS = 64;   // rows that share a visit of the weight

// A byte, and the four-bit halves of one, two's complement.
struct code8 { int8_t byte; };
struct low4 { uint8_t byte; };
struct high4 { uint8_t byte; };

LZ_INLINE vi load_bytes(const void* p) {
  vb b;
  memcpy(&b, p, sizeof b);
#if LZ_LANES == 4 && defined(__aarch64__) && !defined(LZ_ISA_portable)
  int32_t word;
  memcpy(&word, p, 4);
  return bit_cast<vi>(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word))))));
#elif LZ_LANES == 16 && !defined(LZ_ISA_portable)  // gcc 12 takes the lanes of a converted vector one by one
  return bit_cast<vi>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(b)));
#elif LZ_LANES == 8 && !defined(LZ_ISA_portable)
  int64_t word;
  memcpy(&word, p, 8);
  return bit_cast<vi>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(word)));
#else
  return __builtin_convertvector(b, vi);
#endif
}
LZ_INLINE vf load(const code8* p) { return __builtin_convertvector(load_bytes(p), vf); }
LZ_INLINE vf load(const low4* p) { return __builtin_convertvector((load_bytes(p) << 28) >> 28, vf); }
LZ_INLINE vf load(const high4* p) { return __builtin_convertvector((load_bytes(p) << 24) >> 28, vf); }
template <class T> LZ_INLINE vf edge_bytes(const T* p, int64_t n) {
  T room[W] = {};
  memcpy(room, p, size_t(n));
  return load(room);
}
LZ_INLINE vf load_edge(const code8* p, int64_t n) { return edge_bytes(p, n); }
LZ_INLINE vf load_edge(const low4* p, int64_t n) { return edge_bytes(p, n); }
LZ_INLINE vf load_edge(const high4* p, int64_t n) { return edge_bytes(p, n); }

struct Quantized {
  const Tensor &x, &codes, &scale, &zero, &bias, &out;
  int64_t act, bits, block, rows, n, k, blocks;

  float scale_at(int64_t col, int64_t b) const {
    return scale.as<float>()[scale.ndim < 2 ? 0 : col * scale.step(0) + (scale.size(1) == 1 ? 0 : b * scale.step(1))];
  }
  int32_t zero_whole(int64_t col, int64_t b) const {
    return zero.as<int32_t>()[zero.ndim < 2 ? 0 : col * zero.step(0) + (zero.size(1) == 1 ? 0 : b * zero.step(1))];
  }
  float zero_at(int64_t col, int64_t b) const { return float(zero_whole(col, b)); }
  const uint8_t* row(int64_t col) const { return codes.as<uint8_t>() + col * codes.step(0); }
};

// x as floats, block by block; for four-bit codes the even elements of a block before its odd ones. Each part of a block
// is zero-padded to a multiple of W. Behind the rows, the sum of each block.
struct WideRows {
  float* data;
  float* sums;
  int64_t part, step;  // floats of one part of a block, and of a row

  static int64_t part_of(const Quantized& q) { return padded(q.bits == 4 ? q.block / 2 : q.block); }
  static size_t bytes(const Quantized& q) {
    const int64_t step = part_of(q) * (q.bits == 4 ? 2 : 1) * q.blocks;
    return size_t(q.rows * (step + q.blocks)) * sizeof(float);
  }
  WideRows(const Quantized& q, void* room) : data(static_cast<float*>(room)), part(part_of(q)) {
    step = part * (q.bits == 4 ? 2 : 1) * q.blocks;
    sums = data + q.rows * step;
  }
  template <class T> void fill(const Quantized& q, int64_t row, const T* x) const {
    float* to = data + row * step;
    memset(to, 0, size_t(step) * sizeof(float));
    for (int64_t b = 0; b < q.blocks; ++b) {
      const int64_t from = b * q.block, count = q.k - from < q.block ? q.k - from : q.block;
      float total = 0.0f;
      for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(x[from + i]);
        total += value;
        if (q.bits == 4) to[(2 * b + i % 2) * part + i / 2] = value;
        else to[b * part + i] = value;
      }
      sums[row * q.blocks + b] = total;
    }
  }
};

template <int R>
LZ_INLINE void quant_block(const Quantized& q, const WideRows& wide, int64_t row, const uint8_t* const* w, int64_t b, v4* out) {
  const float* a = wide.data + row * wide.step;
  const int64_t from = b * q.block, count = q.k - from < q.block ? q.k - from : q.block;
  if (q.bits == 8) {
    const code8* c[4];
    for (int i = 0; i < 4; ++i) c[i] = reinterpret_cast<const code8*>(w[i]) + from;
    dot4<R>(a + b * wide.part, wide.step, c[0], c[1], c[2], c[3], count, out);
    return;
  }
  v4 odd[R];
  const low4* l[4];
  const high4* h[4];
  for (int i = 0; i < 4; ++i) l[i] = reinterpret_cast<const low4*>(w[i] + from / 2), h[i] = reinterpret_cast<const high4*>(w[i] + from / 2);
  dot4<R>(a + 2 * b * wide.part, wide.step, l[0], l[1], l[2], l[3], count / 2, out);
  dot4<R>(a + (2 * b + 1) * wide.part, wide.step, h[0], h[1], h[2], h[3], count / 2, odd);
  for (int r = 0; r < R; ++r) out[r] = out[r] + odd[r];
}

// c[m][j] for `some` rows and four columns, over all blocks.
template <int R>
__attribute__((noinline)) static void quant_rows(const Quantized& q, const WideRows& wide, int64_t row, int64_t col, int cols, float* c) {
  const uint8_t* w[4];
  int64_t column[4];
  for (int i = 0; i < 4; ++i) column[i] = col + (i < cols ? i : cols - 1), w[i] = q.row(column[i]);
  v4 total[R] = {};
  for (int64_t b = 0; b < q.blocks; ++b) {
    v4 out[R];
    quant_block<R>(q, wide, row, w, b, out);
    const v4 scale = {q.scale_at(column[0], b), q.scale_at(column[1], b), q.scale_at(column[2], b), q.scale_at(column[3], b)};
    if (q.zero) {
      const v4 zero = {q.zero_at(column[0], b), q.zero_at(column[1], b), q.zero_at(column[2], b), q.zero_at(column[3], b)};
      for (int r = 0; r < R; ++r) out[r] = out[r] - zero * wide.sums[(row + r) * q.blocks + b];
    }
    for (int r = 0; r < R; ++r) total[r] = total[r] + out[r] * scale;
  }
  for (int r = 0; r < R; ++r) memcpy(c + r * QUANT_COLS, &total[r], 16);
}

template <class T> inline Status quantized_in_float(const Quantized& q, int threads) {
  void* room = malloc(WideRows::bytes(q) + 64);
  if (!room) return "no memory for the rows";
  const WideRows wide(q, room);
  const RowMap x_at(q.x), out_at(q.out);
  for (int64_t m = 0; m < q.rows; ++m) wide.fill(q, m, q.x.as<T>() + x_at(m));
  const Finish finish = {q.bias, q.act};
  parallel_parts((q.n + QUANT_COLS - 1) / QUANT_COLS, threads, [&](int64_t part) {
    alignas(64) float c[QUANT_ROWS * QUANT_COLS];
    const int64_t at = part * QUANT_COLS;
    const int cols = int(q.n - at < QUANT_COLS ? q.n - at : QUANT_COLS);
    for (int64_t row = 0; row < q.rows; row += QUANT_ROWS) {
      const int some = int(q.rows - row < QUANT_ROWS ? q.rows - row : QUANT_ROWS);
      for (int j = 0; j < cols; j += 4) {
        int m = 0;
        for (; m + DOT_ROWS <= some; m += DOT_ROWS) quant_rows<DOT_ROWS>(q, wide, row + m, at + j, cols - j, c + m * QUANT_COLS + j);
        for (; m < some; ++m) quant_rows<1>(q, wide, row + m, at + j, cols - j, c + m * QUANT_COLS + j);
      }
      for (int m = 0; m < some; ++m) finish.store_row(c + m * QUANT_COLS, at, cols, q.out.as<T>() + out_at(row + m) + at);
    }
  });
  free(room);
  return nullptr;
}

#define QUANTIZED_SIGNATURE "TTTOOTiii"

// x, codes, scale, zero point or None, bias or None, out; activation, bits of a code, block (0: one scale a row).
template <class F> inline Status with_quantized(Call& call, const F& run) {
  const Tensor &x = call.t(0), &codes = call.t(1), &scale = call.t(2), &zero = call.t(3), &bias = call.t(4), &out = call.t(5);
  const int64_t bits = call.i(7);
  if (bits != 4 && bits != 8) return "codes have 4 or 8 bits";
  if (codes.ndim != 2 || codes.dtype != (bits == 8 ? I8 : U8)) return "codes must be int8 [N, K], or uint8 [N, K/2] for 4 bits";
  const int64_t n = codes.size(0), k = codes.size(1) * (bits == 4 ? 2 : 1);
  if (Status wrong = check_linear(x, k, n, bias, out, call.i(6))) return wrong;
  if (!readable(codes)) return RELAYOUT;
  int64_t block = call.i(8);
  if (block < 0 || (block > 0 && k % block) || (block > 0 && bits == 4 && block % 2)) return "the block must divide K, and be even for 4 bits";
  const int64_t wanted = block ? k / block : 1;
  const Tensor* both[] = {&scale, &zero};
  for (const Tensor* t : both) {
    if (!*t) continue;
    if (t->dtype != (t == &zero ? I32 : F32)) return "scales must be float32 and zero points int32";
    if (t->ndim != 0 && !(t->ndim == 2 && t->size(0) == n && t->size(1) == wanted)) return "scales and zero points must be [], or [N, blocks]";
  }
  if (!scale) return "scales are missing";
  if (block == 0) block = k > 0 ? k : 1;
  const int64_t rows = x.rows();
  if (rows == 0 || n == 0) return nullptr;
  const Quantized q = {x, codes, scale, zero, bias, out, call.i(6), bits, block, rows, n, k, (k + block - 1) / block};
  return run(q);
}

}  // namespace LZ_ISA
}  // namespace lz
