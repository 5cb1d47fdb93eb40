// Rows of x as whole numbers in balanced digits to base 256, for dot products of bytes with the codes of a weight.
#pragma once
#include "gemm_quant.hpp"

namespace lz {
namespace LZ_ISA {

constexpr int MOST_BLOCK = 256;

constexpr int HALF = 16;  // bytes

// The even ones of 32 bytes, and the odd ones.
LZ_INLINE void part_pairs(const int8_t* from, int8_t* even, int8_t* odd) {
  typedef uint16_t pairs __attribute__((vector_size(2 * HALF)));
  typedef uint8_t bytes __attribute__((vector_size(HALF)));
  pairs both;
  memcpy(&both, from, sizeof both);
  const bytes first = __builtin_convertvector(both, bytes), second = __builtin_convertvector(both >> 8, bytes);
  memcpy(even, &first, sizeof first);
  memcpy(odd, &second, sizeof second);
}

// Digit d of row m, block b begins at data + ((m * count + d) * blocks + b) * block. For four-bit codes the even numbers of
// each pair of vectors come before the odd ones. `lanes`: for each block, what the numbers of each lane of a sum of four
// products add up to, first without the third digit, then of it alone: what an offset of the codes has added, exactly. They
// are kept `times` so much: where there are no zero points they are what takes the offset off, ready to be added.
struct Digits {
  int8_t* data;
  int32_t* lanes;
  float* scale;  // of each block of each row
  int64_t block, blocks, rows;
  int count, width, bits;  // digits, bytes of a vector, bits of a code
  bool offset;             // whether lanes are wanted: codes have an offset or a zero point
  int32_t times;

  int64_t plane() const { return blocks * block; }
  int64_t lane_step() const { return blocks * (width / 4); }     // from the lanes of one row and digit to the next ones
  int64_t lane_kinds() const { return offset ? count - 1 : 0; }  // one, or two where there is a third digit
  size_t bytes() const {
    return size_t(rows * count * plane()) + size_t(rows * lane_kinds() * lane_step()) * 4 + size_t(rows * blocks) * 4 + 64;
  }
  void place(char* room) {
    data = reinterpret_cast<int8_t*>(room + (64 - reinterpret_cast<uintptr_t>(room) % 64) % 64);
    lanes = reinterpret_cast<int32_t*>(data + rows * count * plane());
    scale = reinterpret_cast<float*>(lanes + rows * lane_kinds() * lane_step());
  }
  // How far the largest number of a block stands above the others, over all blocks of a row; inf where not all are finite.
  template <class T> float crest(const T* x, int64_t k) const {
    float most = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) {
      alignas(64) float wide[MOST_BLOCK + W];
      const int64_t n = spread(x, k, b, wide);
      vf top = splat(0.0f), all = splat(0.0f);
      for (int64_t i = 0; i < block; i += W) top = vmax(vabs(load(wide + i)), top), all = all + vabs(load(wide + i));
      const float peak = max_of(top), mean = sum(all) / float(n);
      if (!(mean < __builtin_inff())) return __builtin_inff();
      if (peak > most * mean) most = peak / mean;
    }
    return most;
  }
  template <class T> int64_t spread(const T* x, int64_t k, int64_t b, float* wide) const {
    const int64_t n = k - b * block < block ? k - b * block : block;
    widen_row(x + b * block, n, wide, 1.0f);
    for (int64_t i = n; i < block + W; ++i) wide[i] = 0.0f;
    return n;
  }
  // All but the lanes, which the dot products of the digits with ones are.
  template <class T> void fill(int64_t row, const T* x, int64_t k) const {
    const float unit = count == 2 ? 8192.0f : 2097152.0f;  // twice that is what the digits hold
    const int64_t group = bits == 4 ? 2 * width : width;   // numbers of a vector, or of the pair
    for (int64_t b = 0; b < blocks; ++b) {
      alignas(64) float wide[MOST_BLOCK + W];
      alignas(64) int8_t digit[3][MOST_BLOCK + W];
      spread(x, k, b, wide);
      vf top = splat(0.0f);
      for (int64_t i = 0; i < block; i += W) top = vmax(vabs(load(wide + i)), top);
      float peak = max_of(top);
      if (peak < 1e-30f) peak = 1e-30f;
      // By a power of two: numbers of few bits then come out whole unless they are far below the largest.
      const float power = bit_cast<float>(bit_cast<uint32_t>(peak) & 0x7f800000u), inverse = unit / power;
      scale[row * blocks + b] = power / unit;
      for (int64_t i = 0; i < block; i += W) {
        vi left = bit_cast<vi>(load(wide + i) * inverse + 12582912.0f) - 0x4b400000;
        for (int d = 0; d + 1 < count; ++d) {
          const vi low = ((left + 128) & 255) - 128;
          const vb bytes = __builtin_convertvector(low, vb);
          memcpy(digit[d] + i, &bytes, sizeof bytes);
          left = (left - low) >> 8;
        }
        const vb bytes = __builtin_convertvector(left, vb);
        memcpy(digit[count - 1] + i, &bytes, sizeof bytes);
      }
      for (int d = 0; d < count; ++d) {
        int8_t* to = data + (row * count + d) * plane() + b * block;
        if (bits == 8) {
          memcpy(to, digit[d], size_t(block));
          continue;
        }
        for (int64_t from = 0; from < block; from += group)
          for (int64_t i = 0; i < width; i += HALF) part_pairs(digit[d] + from + 2 * i, to + from + i, to + from + width + i);
      }
    }
  }
};

}  // namespace LZ_ISA
}  // namespace lz
