// The adapter of sampling. Its draw moves the generator, so everything is checked before it.
#include "adapter.hpp"

namespace lz {
namespace {

constexpr Tensor NOTHING = {nullptr, nullptr, nullptr, 0, NONE};

// A parameter: None (-1, no such filter), a number, or a tensor of one number a row.
bool parameter(Plain& p, PyObject* given, bool whole, int64_t batch, Arg* rows, Arg* one) {
  rows->t = NOTHING;
  one->i = -1;
  one->f = -1.0;
  if (given == &_Py_NoneStruct) return true;
  if (whole && given->ob_type == &PyLong_Type) {
    one->i = PyLong_AsLongLong(given);
    if (one->i != -1 || !PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }
  if (!whole && number(given, &one->f)) return true;
  return p.tensor(given, rows) && rows->t.ndim == 1 && rows->t.size(0) == batch && size_of(rows->t.dtype) >= 2 &&
         rows->t.dtype != I16;
}

}  // namespace

// sample(logits, top_k, top_p, min_p, temperature, generator); `number` 1 and 2: sample_topk(logits, k, temperature,
// generator) and sample_topp(logits, p, temperature, generator)
PyObject* sample(const Adapter& a, PyObject* const* given) {
  PyObject* none = &_Py_NoneStruct;
  PyObject *k = a.number == 2 ? none : given[1], *top = a.number == 0 ? given[2] : a.number == 2 ? given[1] : none;
  PyObject *least = a.number == 0 ? given[3] : none, *temperature = given[a.arity - 2], *generator = given[a.arity - 1];
  Arg args[11];
  Plain p;
  int64_t batch = 0;
  auto read = [&] {
    p.start_over();  // an index has no gradient: none is asked about
    if (temperature == none || !p.tensor(given[0], &args[0])) return false;
    const Tensor& logits = args[0].t;
    if (logits.ndim != 2 || logits.size(1) > 0x7ffffff0) return false;
    if (logits.dtype != F32 && logits.dtype != BF16 && logits.dtype != F16) return false;
    batch = logits.size(0);
    return parameter(p, k, true, batch, &args[3], &args[4]) && parameter(p, top, false, batch, &args[5], &args[6]) &&
           parameter(p, least, false, batch, &args[7], &args[8]) &&
           parameter(p, temperature, false, batch, &args[9], &args[10]);
  };
  args[2].t = NOTHING;
  if (a.entries[0]->run == nullptr || !read() || !p.made(&batch, 1, I64, &args[1])) return nullptr;
  if (args[9].t || args[10].f > 0.0) {
    const int64_t before = batch;
    if (!p.draw(batch, generator, &args[2])) return nullptr;
    if (!read() || batch != before)  // a mode of torch may have run anybody's code in the draw
      return PyErr_Format(PyExc_RuntimeError, "%s: the logits were changed during the call", a.name);
  }
  return p.must_run(a, args, 11) ? p.first() : nullptr;
}

}  // namespace lz
