// The instruction sets this library was built for, and which of them this machine has.
#pragma once
#include "lz.hpp"

namespace lz {

struct Unit {
  const char* isa;
  const Kernel* kernels;
};

struct Isa {
  const char* name;
  bool (*here)();
};

extern const Unit UNITS[];      // written by build.py, ends with a null name
extern const Isa ISAS[];        // worst first, ends with a null name
extern const char SOURCE_HASH[];

int isa_rank(const char* name);  // -1: unknown

}  // namespace lz
