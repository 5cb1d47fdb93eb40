/* Near keys of attention: the key with the KV length replaced by its bucket, and the strides by their class.
 *
 * The same coarsening as layerzero/_ops/bucketed.py, of which a test compares every case: a decode loop meets a new
 * exact key at each step, its bucketed key stays until a bucket ends.
 */
#ifndef LAYERZERO_NEAR_H
#define LAYERZERO_NEAR_H

#include "key.h"

enum { ORDER_BOTH, ORDER_GIVEN, ORDER_SWAPPED, ORDER_OTHER };

typedef struct {
    int64_t last;
    int aligned;
    int order;
} Lies;

/* The first place where `value` could stand in the ascending list: bisect_left. */
static int64_t bucket_of(const int64_t *edges, int64_t count, int64_t value)
{
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (edges[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int dense_in(const int64_t *shape, const int64_t *strides, const int order[4])
{
    uint64_t expected = 1;
    for (int i = 3; i >= 0; i--) {
        int axis = order[i];
        if (shape[axis] != 1 && (uint64_t)strides[axis] != expected)
            return 0;
        expected *= (uint64_t)shape[axis];
    }
    return 1;
}

static int order_of(const int64_t *shape, const int64_t *strides)
{
    static const int given[4] = {0, 1, 2, 3}, swapped[4] = {0, 2, 1, 3};
    int one = dense_in(shape, strides, given), two = dense_in(shape, strides, swapped);
    return one && two ? ORDER_BOTH : one ? ORDER_GIVEN : two ? ORDER_SWAPPED : ORDER_OTHER;
}

/* The worst stride class over q, k and v, each of rank 4. */
static Lies stride_class(const View *const tensors[3])
{
    Lies found = {1, 1, ORDER_BOTH};
    for (int i = 0; i < 3; i++) {
        const View *t = tensors[i];
        const int64_t *strides = t->strides;
        int64_t dense[4];
        if (is_contiguous(t)) {
            uint64_t step = 1;
            for (int axis = 3; axis >= 0; axis--) {
                dense[axis] = (int64_t)step;
                step *= (uint64_t)(t->shape[axis] > 1 ? t->shape[axis] : 1);
            }
            strides = dense;
        }
        int64_t size = ((int64_t)t->type_bits * t->type_lanes + 7) / 8;
        if (t->shape[3] > 1 && strides[3] != 1)
            found.last = strides[3];
        for (int axis = 0; axis < 3; axis++)
            if (t->shape[axis] > 1 && ((uint64_t)strides[axis] * (uint64_t)size) % 16 != 0)
                found.aligned = 0;
        int order = order_of(t->shape, strides);
        if (order != ORDER_BOTH && order != found.order)
            found.order = found.order == ORDER_BOTH ? order : ORDER_OTHER;
    }
    if (found.order == ORDER_BOTH)
        found.order = ORDER_GIVEN;
    return found;
}

/* Write the bucketed key of q, k, v; `rest` holds the words of everything else. 0 where there is no sound one. */
static int bucketed_key(Key *out, const View *q, const View *k, const View *v, int sequence_first, const uint64_t *rest,
                        int rest_length, const int64_t *edges, int64_t edge_count)
{
    if (q->ndim != 4 || k->ndim != 4 || v->ndim != 4 || rest_length > MOST_WORDS - 24)
        return 0;
    int axis = sequence_first ? 1 : 2;
    int64_t rows = q->shape[axis], cols = k->shape[axis];
    int same = memcmp(k->shape, v->shape, 4 * sizeof(int64_t)) == 0;
    if (!same && v->shape[axis] != cols)
        return 0;
    const View *const all[3] = {q, k, v};
    uint64_t lies;
    int64_t last = 0;
    if (is_contiguous(q) && is_contiguous(k) && is_contiguous(v)) {
        lies = 0xff;
    } else {
        Lies found = stride_class(all);
        lies = (uint64_t)found.order << 1 | (uint64_t)found.aligned;
        last = found.last;
    }
    uint64_t *to = out->words;
    *to++ = ~0ull; /* no exact key begins so */
    *to++ = kind_of(q);
    *to++ = kind_of(k);
    *to++ = kind_of(v);
    for (int i = 0; i < 4; i++)
        *to++ = (uint64_t)q->shape[i];
    for (int i = 0; i < 4; i++)
        if (i != axis)
            *to++ = (uint64_t)k->shape[i];
    *to++ = (uint64_t)same;
    for (int i = 0; i < 4; i++)
        if (i != axis)
            *to++ = same ? 0 : (uint64_t)v->shape[i];
    *to++ = (uint64_t)(rows < cols) << 1 | (uint64_t)(rows == cols);
    *to++ = (uint64_t)bucket_of(edges, edge_count, cols);
    *to++ = lies;
    *to++ = (uint64_t)last;
    memcpy(to, rest, (size_t)rest_length * sizeof(uint64_t));
    out->length = (int)(to - out->words) + rest_length;
    return 1;
}

#endif
