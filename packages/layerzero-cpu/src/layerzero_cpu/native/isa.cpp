// What the processor and the operating system allow, asked of them directly.
#include "isa.hpp"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace lz {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
struct Leaf {
  uint32_t a, b, c, d;
};

Leaf leaf(uint32_t n, uint32_t sub) {
  Leaf l = {0, 0, 0, 0};
  if (__get_cpuid_max(0, nullptr) >= n) __cpuid_count(n, sub, l.a, l.b, l.c, l.d);
  return l;
}

uint64_t saved_by_the_system() {
  if (!(leaf(1, 0).c & (1u << 27))) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool avx2() {
  Leaf one = leaf(1, 0), seven = leaf(7, 0);
  bool fma = one.c & (1u << 12), f16c = one.c & (1u << 29);
  return (saved_by_the_system() & 6) == 6 && fma && f16c && (seven.b & (1u << 5));
}

bool avx512() {
  Leaf seven = leaf(7, 0);
  uint32_t all = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  return avx2() && (saved_by_the_system() & 0xe6) == 0xe6 && (seven.b & all) == all;
}

bool avx512_vnni() { return avx512() && (leaf(7, 0).c & (1u << 11)); }

bool avx512_bf16() { return avx512_vnni() && (leaf(7, 1).a & (1u << 5)); }

[[maybe_unused]] bool amx() {
  uint32_t all = (1u << 22) | (1u << 24) | (1u << 25);  // BF16, TILE, INT8
  if (!avx512_bf16() || (leaf(7, 0).d & all) != all || (saved_by_the_system() & 0x60000) != 0x60000) return false;
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // the tile registers are lent on request, once a process
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
[[maybe_unused]] bool dotprod() {
#if defined(__linux__)
  uint64_t have = getauxval(16), all = (1ul << 20) | (1ul << 10) | (1ul << 9);  // AT_HWCAP: ASIMDDP, ASIMDHP, FPHP
  return (have & all) == all;
#else
  return true;
#endif
}
#endif

}  // namespace

const Isa ISAS[] = {
    {"portable", always},
#if defined(LZ_EMULATED)  // tests: the intrinsics are written out in C++
    {"avx512", always},
    {"avx512_vnni", always},
    {"amx", always},
#elif defined(__x86_64__)
    {"avx2", avx2},
    {"avx512", avx512},
    {"avx512_vnni", avx512_vnni},
    {"avx512_bf16", avx512_bf16},
    {"amx", amx},
#elif defined(__aarch64__)
    {"neon", always},
    {"dotprod", dotprod},
#endif
    {nullptr, nullptr},
};

int isa_rank(const char* name) {
  for (int i = 0; ISAS[i].name; ++i)
    if (strcmp(ISAS[i].name, name) == 0) return i;
  return -1;
}

}  // namespace lz
