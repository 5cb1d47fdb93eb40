/* Keys: everything a choice depends on, as 64-bit words on the stack.
 *
 * Equal words mean an equal hot key in Python (layerzero/dispatch/hot.py and the ops): per tensor shape, dtype, device
 * and strides (a flag stands for contiguous, whose strides follow from the shape), words and flags by identity, numbers
 * by type, determinism. What is not expressed here (a gradient, autocast, a subclass, a rank above MOST_AXES) has no
 * key, and the call takes Python's path.
 */
#ifndef LAYERZERO_KEY_H
#define LAYERZERO_KEY_H

#include <stdint.h>
#include <string.h>

#include "exchange.h"

#define MOST_AXES 8
#define MOST_WORDS 192

typedef struct {
    int length;
    uint64_t words[MOST_WORDS];
} Key;

static uint64_t factors[MOST_WORDS];

/* One odd factor for each place, so that the products do not wait for each other. */
static void fill_factors(void)
{
    uint64_t seed = 0x6c61796572303030ull;
    for (int i = 0; i < MOST_WORDS; i++) {
        seed += 0x9e3779b97f4a7c15ull;
        uint64_t z = seed;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        factors[i] = (z ^ (z >> 31)) | 1u;
    }
}

static inline uint64_t hash_of(const Key *key)
{
    uint64_t sum = (uint64_t)key->length;
    for (int i = 0; i < key->length; i++) {
        uint64_t word = key->words[i];
        sum += (word ^ (word >> 32)) * factors[i];
    }
    sum ^= sum >> 32;
    return sum * 0x9e3779b97f4a7c15ull;
}

static inline int same_key(const Key *a, const Key *b)
{
    return a->length == b->length && memcmp(a->words, b->words, (size_t)a->length * sizeof(uint64_t)) == 0;
}

/* As torch's is_contiguous(): an axis of one element may have any stride, an empty tensor is contiguous. */
static inline int is_contiguous(const View *t)
{
    int64_t expected = 1;
    int dense = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        int64_t size = t->shape[i];
        if (size == 0)
            return 1;
        if (size != 1) {
            dense &= t->strides[i] == expected;
            expected *= size;
        }
    }
    return dense;
}

/* dtype and device in one word; never 0, which stands for an absent tensor. */
static inline uint64_t kind_of(const View *t)
{
    return 0x20u | (uint64_t)t->type_code << 8 | (uint64_t)t->type_bits << 16 | (uint64_t)(uint8_t)t->type_lanes << 24
         | (uint64_t)(uint16_t)t->device_type << 32 | (uint64_t)(uint16_t)t->device_id << 48;
}

/* What one word cannot hold is not keyed, nor is a wrapper without memory of its own (functionalize's), nor integers of
 * eight bits: torch lends its int1 to int7 under that name too. */
static inline int keyable(const View *t)
{
    if (t->type_code <= 1 && t->type_bits <= 8)
        return 0;
    if (t->data == NULL) {
        for (int i = 0; i < t->ndim; i++)
            if (t->shape == NULL || t->shape[i] == 0)
                goto empty;
        return 0;
    }
empty:
    return t->ndim >= 0 && t->ndim <= MOST_AXES && t->type_lanes <= 0xff && t->device_type >= 0
        && t->device_type <= 0xffff && t->device_id >= 0 && t->device_id <= 0xffff
        && (t->ndim == 0 || (t->shape != NULL && t->strides != NULL));
}

/* Add one tensor; the caller has left room for 1 + 2 * MOST_AXES words. */
static inline void add_tensor(Key *key, const View *t)
{
    uint64_t *out = key->words + key->length;
    int contiguous = is_contiguous(t);
    *out++ = kind_of(t) | (uint64_t)contiguous << 4 | (uint64_t)t->ndim;
    for (int i = 0; i < t->ndim; i++)
        *out++ = (uint64_t)t->shape[i];
    if (!contiguous)
        for (int i = 0; i < t->ndim; i++)
            *out++ = (uint64_t)t->strides[i];
    key->length = (int)(out - key->words);
}

#endif
