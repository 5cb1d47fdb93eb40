// DLPack's exchange table, by which torch shows a tensor's memory to C without its own headers: the layout of version 1.
#pragma once
#include <stdint.h>

namespace lz {

struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLExchange {
  uint32_t major, minor;
  DLExchange* previous;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  int (*view)(void* object, DLTensor* out);
  void* current_stream;
};

enum { DL_CPU = 1, DL_CUDA_HOST = 3, DL_ROCM_HOST = 11 };

}  // namespace lz
