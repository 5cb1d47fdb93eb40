// The emulated tiles themselves: a product against plain loops, and misuse that must end the program (argument: which).
#include <immintrin.h>

static void configured(int rows, int bytes) {
  alignas(64) uint8_t c[64] = {};
  c[0] = 1;
  for (int t = 0; t < 8; ++t) c[16 + 2 * t] = uint8_t(bytes), c[48 + t] = uint8_t(rows);
  _tile_loadconfig(c);
}

int main(int count, char** given) {
  const int wrong = count > 1 ? atoi(given[1]) : 0;
  alignas(64) uint16_t a[16][32], b[16][32];
  alignas(64) float c[16][16];
  if (wrong == 1) _tile_zero(0);                      // never configured
  if (wrong == 2) configured(17, 64);                 // more rows than a tile has
  if (wrong == 3) configured(16, 128);                // longer rows than a tile has
  configured(16, 64);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 32; ++j) {
      a[i][j] = lz_to_bf16(float((i * 7 + j * 3) % 11 - 5));
      b[i][j] = lz_to_bf16(float((i * 5 + j * 13) % 9 - 4));
    }
  _tile_zero(0);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  if (wrong == 4) _tile_dpbf16ps(0, 1, 1);            // the same tile twice
  if (wrong == 5) _tile_stored(0, &c[0][1], 64);      // across cache lines
  _tile_dpbf16ps(0, 1, 2);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, 64);
  _tile_release();
  if (wrong == 6) _tile_stored(0, c, 64);             // given back
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      double sum = 0.0;
      for (int k = 0; k < 32; ++k) {
        const double x = (m * 7 + k * 3) % 11 - 5, y = (k / 2 * 5 + (2 * n + k % 2) * 13) % 9 - 4;
        sum += 2.0 * x * y;
      }
      if (sum != double(c[m][n])) return 1;
    }
  return 0;
}
