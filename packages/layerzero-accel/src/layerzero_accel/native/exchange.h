/* DLPack's C exchange table, as much of it as is read here.
 *
 * A type that can be exchanged carries a capsule named "dlpack_exchange_api" in its attribute
 * __dlpack_c_exchange_api__, which points to this table. Within one major version the layout is fixed; a table of
 * another major version may hang in the chain. Written from the published layout (DLPack 1.2 and 1.3); torch's own
 * headers are not needed, and one binary serves every torch that has the capsule.
 */
#ifndef LAYERZERO_EXCHANGE_H
#define LAYERZERO_EXCHANGE_H

#include <stdint.h>

#define EXCHANGE_CAPSULE "dlpack_exchange_api"
#define EXCHANGE_MAJOR 1

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_ROCM = 10, DL_ROCM_HOST = 11 };

typedef struct {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t type_code;
    uint8_t type_bits;
    uint16_t type_lanes;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} View;

typedef struct Exchange {
    uint32_t major;
    uint32_t minor;
    struct Exchange *older;
    void *allocate;
    void *export_owned;
    void *import_owned;
    /* Fills a view that borrows shape and strides from the object; 0, or -1 with a Python exception set. */
    int (*view)(void *object, View *out);
    void *current_stream;
} Exchange;

#endif
