// The adapters, one an op: canonical arguments into those of the kernel.
#include <string.h>

#include "adapter.hpp"

namespace lz {
namespace {

// rms_norm(x, weight, eps); `number` is added to the weight
PyObject* rms_norm(const Adapter& a, PyObject* const* given) {
  Arg args[5];
  Plain p;
  args[2].f = a.number;
  bool fine = number(given[2], &args[3].f) && p.tensor(given[0], &args[0]) && p.maybe(given[1], &args[1]) &&
              p.like(args[0].t, &args[4]) && p.run(a, 0, args, 5);
  return fine ? p.first() : nullptr;
}

// add_rms_norm(x, residual, weight, eps)
PyObject* add_rms_norm(const Adapter& a, PyObject* const* given) {
  Arg args[7];
  Plain p;
  args[3].f = a.number;
  bool fine = number(given[3], &args[4].f) && p.tensor(given[0], &args[0]) && p.tensor(given[1], &args[1]) &&
              args[0].t.dtype == args[1].t.dtype && p.maybe(given[2], &args[2]) && p.like(args[0].t, &args[5]) &&
              p.like(args[1].t, &args[6]) && p.run(a, 0, args, 7);
  return fine ? p.both() : nullptr;
}

// layer_norm(x, weight, bias, eps)
PyObject* layer_norm(const Adapter& a, PyObject* const* given) {
  Arg args[5];
  Plain p;
  bool fine = number(given[3], &args[3].f) && p.tensor(given[0], &args[0]) && p.maybe(given[1], &args[1]) &&
              p.maybe(given[2], &args[2]) && p.like(args[0].t, &args[4]) && p.run(a, 0, args, 5);
  return fine ? p.first() : nullptr;
}

bool is(PyObject* text, const char* word) {
  return text->ob_type == &PyUnicode_Type && PyUnicode_CompareWithASCIIString(text, word) == 0;
}

// silu_and_mul(x), relu_and_mul(x), gelu_and_mul(x, approximate); `number` is the kind, the tanh's follows the erf's
PyObject* gated(const Adapter& a, PyObject* const* given) {
  Arg args[3];
  Plain p;
  args[2].i = a.number;
  if (a.arity == 2) {
    if (is(given[1], "tanh")) args[2].i += 1;
    else if (!is(given[1], "none")) return nullptr;
  }
  if (!p.tensor(given[0], &args[0])) return nullptr;
  const Tensor& x = args[0].t;
  int64_t shape[MOST_AXES];
  memcpy(shape, x.shape, size_t(x.ndim) * sizeof(int64_t));
  shape[x.ndim - 1] /= 2;
  bool fine = shape[x.ndim - 1] > 0 && p.made(shape, x.ndim, x.dtype, &args[1]) && p.run(a, 0, args, 3);
  return fine ? p.first() : nullptr;
}

// rope(q, k, cos, sin, interleaved, layout, position_ids, inplace); in place is Python's, which tells autograd of it
PyObject* rope(const Adapter& a, PyObject* const* given) {
  Arg args[10];
  Plain p;
  int interleaved = truth(given[4]);
  if (interleaved < 0 || truth(given[7]) != 0) return nullptr;
  args[7].i = interleaved;
  args[8].i = is(given[5], "BHSD") ? 2 : is(given[5], "BSHD") ? 1 : 0;
  args[9].i = 0;
  bool fine = args[8].i != 0 && p.tensor(given[0], &args[0]) && p.maybe(given[1], &args[1]) &&
              p.tensor(given[2], &args[2]) && p.tensor(given[3], &args[3]) && p.maybe(given[6], &args[4]);
  if (!fine || !p.like(args[0].t, &args[5])) return nullptr;
  bool second = bool(args[1].t);
  args[6].t = Tensor{nullptr, nullptr, nullptr, 0, NONE};
  if (second && !p.like(args[1].t, &args[6])) return nullptr;
  if (!p.run(a, 0, args, 10)) return nullptr;
  return second ? p.both() : p.first_and_none();
}

// linear(x, weight, bias, activation)
PyObject* linear(const Adapter& a, PyObject* const* given) {
  static const char* const words[] = {"silu", "relu", "gelu", "gelu_tanh"};
  Arg args[5];
  Plain p;
  args[4].i = given[3] == &_Py_NoneStruct ? 0 : -1;
  for (int i = 0; args[4].i < 0 && i < 4; ++i)
    if (is(given[3], words[i])) args[4].i = i + 1;
  if (args[4].i < 0 || !p.tensor(given[0], &args[0]) || !p.tensor(given[1], &args[1]) || !p.maybe(given[2], &args[2]))
    return nullptr;
  const Tensor &x = args[0].t, &w = args[1].t;
  if (w.ndim != 2 || w.size(1) != x.size(-1)) return nullptr;
  int64_t shape[MOST_AXES];
  memcpy(shape, x.shape, size_t(x.ndim) * sizeof(int64_t));
  shape[x.ndim - 1] = w.size(0);
  bool fine = p.made(shape, x.ndim, x.dtype, &args[3]) && p.run(a, 0, args, 5);
  return fine ? p.first() : nullptr;
}

constexpr int64_t DECODE_ROWS = 16;  // as in attention.py

// attention(query, key, value, mask, dropout, causal, scale, window, softcap, slopes, lse)
PyObject* attention(const Adapter& a, PyObject* const* given) {
  PyObject *causal = given[5], *window = given[7], *lse = given[10];
  Arg args[13];
  Plain p;
  int way = truth(causal);
  args[9].i = way >= 0 ? way : 2;
  args[10].i = args[11].i = -1;
  args[8].f = 0.0;
  if (way < 0 && !is(causal, "bottom_right")) return nullptr;
  if (window != &_Py_NoneStruct) {
    if (window->ob_type != &PyTuple_Type || PyTuple_Size(window) != 2) return nullptr;
    for (int i = 0; i < 2; ++i) {
      PyObject* side = PyTuple_GetItem(window, i);
      if (side->ob_type != &PyLong_Type) return nullptr;
      args[10 + i].i = PyLong_AsLongLong(side);
      if (args[10 + i].i == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return nullptr;
      }
    }
  }
  if (given[8] != &_Py_NoneStruct && !number(given[8], &args[8].f)) return nullptr;
  if (truth(lse) < 0 || !p.tensor(given[0], &args[0]) || !p.tensor(given[1], &args[1]) ||
      !p.tensor(given[2], &args[2]) || !p.maybe(given[3], &args[5]) || !p.maybe(given[9], &args[6]))
    return nullptr;
  const Tensor &q = args[0].t, &k = args[1].t, &v = args[2].t, &mask = args[5].t, &slopes = args[6].t;
  if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4 || (mask && mask.ndim != 4) || (slopes && slopes.dtype != F32))
    return nullptr;
  if (given[6] == &_Py_NoneStruct) args[7].f = 1.0 / __builtin_sqrt(double(q.size(3)));
  else if (!number(given[6], &args[7].f)) return nullptr;
  int64_t shape[4] = {q.size(0), q.size(1), q.size(2), v.size(3)};
  if (!(q.size(3) == v.size(3) ? p.like(q, &args[3]) : p.made(shape, 4, q.dtype, &args[3]))) return nullptr;
  args[4].t = args[12].t = Tensor{nullptr, nullptr, nullptr, 0, NONE};
  if (truth(lse) == 1 && !p.made(shape, 3, F32, &args[4])) return nullptr;
  if (!p.run(a, q.size(2) * q.size(1) <= DECODE_ROWS * k.size(1) ? 0 : 1, args, 13)) return nullptr;
  return truth(lse) == 1 ? p.both() : p.first();
}

}  // namespace

#define ONE(kernel, signature) {kernel, nullptr}, {signature, nullptr}
#define UNSET {nullptr, nullptr}, nullptr, {nullptr, nullptr, 0, nullptr}

Adapter ADAPTERS[ADAPTER_COUNT] = {
    {"rms_norm", 3, 0, ONE("rms_norm", "TOffT"), &rms_norm, UNSET},
    {"gemma_rms_norm", 3, 1, ONE("rms_norm", "TOffT"), &rms_norm, UNSET},
    {"add_rms_norm", 4, 0, ONE("add_rms_norm", "TTOffTT"), &add_rms_norm, UNSET},
    {"gemma_add_rms_norm", 4, 1, ONE("add_rms_norm", "TTOffTT"), &add_rms_norm, UNSET},
    {"layer_norm", 4, 0, ONE("layer_norm", "TOOfT"), &layer_norm, UNSET},
    {"silu_and_mul", 1, 0, ONE("gated", "TTi"), &gated, UNSET},
    {"gelu_and_mul", 2, 1, ONE("gated", "TTi"), &gated, UNSET},
    {"relu_and_mul", 1, 3, ONE("gated", "TTi"), &gated, UNSET},
    {"rope", 8, 0, ONE("rope", "TOTTOTOiii"), &rope, UNSET},
    {"linear", 4, 0, ONE("linear", "TTOTi"), &linear, UNSET},
    {"attention", 11, 0, {"attention_decode", "attention_prefill"}, {"TTTTOOOffiiio", "TTTTOOOffiiio"},
     &attention, UNSET},
    {"sample", 6, 0, ONE("sample", "TTOOiOfOfOf"), &sample, UNSET},
    {"sample_topk", 4, 1, ONE("sample", "TTOOiOfOfOf"), &sample, UNSET},
    {"sample_topp", 4, 2, ONE("sample", "TTOOiOfOfOf"), &sample, UNSET},
};

}  // namespace lz
