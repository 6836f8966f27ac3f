#include "alias.h"
#include "containers.h"
#include "inspect.h"
#include "op_call.h"
#include "trace_python.h"
#include "walk_python.h"

#ifdef WEAKREF_EXT_CUDA
#include "cuda/pool_trace.h"
#endif

#include <torch/csrc/Exceptions.h>

namespace {

using weakref_ext::Options;

// A passthrough argument, checked: nothing, a tuple of types, or a function.
PyObject* parse_passthrough(PyObject* passthrough) {
  bool good = true;
  if (passthrough != nullptr && PyTuple_Check(passthrough)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(passthrough); ++i) {
      good = good && PyType_Check(PyTuple_GET_ITEM(passthrough, i));
    }
  } else if (passthrough != nullptr) {
    good = PyCallable_Check(passthrough) && !PyType_Check(passthrough);
  }
  TORCH_CHECK_TYPE(good, "passthrough must be a tuple of types, or a function (type, path) -> bool");
  return passthrough;
}

void parse_pool(PyObject* pool, [[maybe_unused]] Options& options) {
  if (pool == nullptr || pool == Py_None) {
    return;
  }
#ifdef WEAKREF_EXT_CUDA
  unsigned long long first = 0, second = 0;
  if (!PyTuple_Check(pool) || !PyArg_ParseTuple(pool, "KK", &first, &second)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "pool must be a graph pool handle: torch.cuda.graph_pool_handle() or CUDAGraph.pool()");
  }
  options.owns = weakref_ext::cuda::owned_by_pool({first, second});
#else
  TORCH_CHECK(
      false,
      "weakref_ext was built without its CUDA part, which pool= needs: rebuild it on a CUDA build of torch, with "
      "WEAKREF_EXT_CUDA=1");
#endif
}

PyObject* weak_ref_tensors(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (C10_LIKELY(count == 1 && names == nullptr)) {
    return weakref_ext::weak_ref_tensors(args[0]);
  }
  HANDLE_TH_ERRORS
  THPObjectPtr positional(PyTuple_New(count)), keywords(PyDict_New());
  if (!positional || !keywords) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(positional.get(), i, Py_NewRef(args[i]));
  }
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    if (PyDict_SetItem(keywords, PyTuple_GET_ITEM(names, i), args[count + i]) != 0) {
      return nullptr;
    }
  }
  static const char* known[] = {"out", "pool", "outside", "cpu", "passthrough", nullptr};
  PyObject *out = nullptr, *pool = nullptr, *passthrough = nullptr;
  const char *outside = "keep", *cpu = "weak";
  if (!PyArg_ParseTupleAndKeywords(positional,
                                   keywords,
                                   "O|$OssO:weak_ref_tensors",
                                   const_cast<char**>(known),
                                   &out,
                                   &pool,
                                   &outside,
                                   &cpu,
                                   &passthrough)) {
    return nullptr;
  }
  Options options;
  options.refuse_outside = strcmp(outside, "raise") == 0;
  if (!options.refuse_outside && strcmp(outside, "keep") != 0) {
    return PyErr_Format(PyExc_ValueError, "outside must be 'keep' or 'raise', got '%s'", outside);
  }
  options.keep_cpu = strcmp(cpu, "keep") == 0;
  if (!options.keep_cpu && strcmp(cpu, "weak") != 0) {
    return PyErr_Format(PyExc_ValueError, "cpu must be 'weak' or 'keep', got '%s'", cpu);
  }
  options.passthrough = parse_passthrough(passthrough);
  parse_pool(pool, options);
  return weakref_ext::weak_ref_tensors(out, options);
  END_HANDLE_TH_ERRORS
}

bool is_tensor(PyObject* object) {
  if (weakref_ext::is_tensor_type(Py_TYPE(object))) {
    return true;
  }
  PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, got %R", Py_TYPE(object));
  return false;
}

using Query = bool (*)(const at::Tensor&);

template <Query query> PyObject* ask(PyObject* /*module*/, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!is_tensor(tensor)) {
    return nullptr;
  }
  return PyBool_FromLong(query(THPVariable_Unpack(tensor)));
  END_HANDLE_TH_ERRORS
}

PyObject* owns(PyObject* /*module*/, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *candidate = nullptr, *tensor = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &candidate, &tensor) || !is_tensor(candidate) || !is_tensor(tensor)) {
    return nullptr;
  }
  return PyBool_FromLong(weakref_ext::owns(THPVariable_Unpack(candidate), THPVariable_Unpack(tensor)));
  END_HANDLE_TH_ERRORS
}

PyObject* map_tensors(PyObject* /*module*/, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *out = nullptr, *function = nullptr, *passthrough = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &out, &function, &passthrough)) {
    return nullptr;
  }
  return weakref_ext::map_tensors(out, function, parse_passthrough(passthrough));
  END_HANDLE_TH_ERRORS
}

PyObject* leaves(PyObject* /*module*/, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *out = nullptr, *passthrough = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &out, &passthrough)) {
    return nullptr;
  }
  return weakref_ext::leaves(out, parse_passthrough(passthrough));
  END_HANDLE_TH_ERRORS
}

PyObject* describe(PyObject* /*module*/, PyObject* out) {
  HANDLE_TH_ERRORS
  return weakref_ext::describe(out);
  END_HANDLE_TH_ERRORS
}

PyObject* register_type(PyObject* /*module*/, PyObject* args) {
  HANDLE_TH_ERRORS
  PyTypeObject* type = nullptr;
  PyObject* answer = nullptr;
  if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &answer) || !weakref_ext::register_type(type, answer)) {
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* set_resolver(PyObject* /*module*/, PyObject* resolver) {
  weakref_ext::set_resolver(resolver);
  Py_RETURN_NONE;
}

constexpr char weak_ref_tensors_doc[] =
    R"doc(weak_ref_tensors(out, *, pool=None, outside='keep', cpu='weak', passthrough=())
--

Return the structure `out` with every tensor replaced by a non-owning alias.

list, tuple, dict, OrderedDict, defaultdict, named tuples, torch.return_types, dataclasses, torch pytree nodes and tensor
subclasses with __tensor_flatten__, nested to any depth, come back as new ones of the same type; int, bool, torch.Size
and layer names pass through as the same object. An alias has the same data pointer, sizes, strides, storage offset,
dtype, device, conj and neg bits as its source, does not require grad, and does not keep the memory allocated. A tensor
that occurs twice gives one alias; tensors that share a storage give aliases that share one.

An alias is valid for as long as something else keeps its memory and nobody else was handed it: read it, or clone it,
before the graph pool that owns the memory goes or another capture that was given the block replays.

Args:
    out: the structure.
    pool: a graph pool handle (torch.cuda.graph_pool_handle(), CUDAGraph.pool()). Only tensors whose memory that pool
        owns become weak. Legal inside a capture; costs one snapshot of the pool.
    outside: what becomes of the others (CPU tensors, static inputs, eager results, another pool's): 'keep' returns them
        as they are, strong; 'raise' raises ValueError.
    cpu: 'keep' returns CPU tensors as they are, strong: no graph pool keeps their memory.
    passthrough: what else passes through in this call: a tuple of exact types, for instance (type(None),), or a function
        (type, path) -> bool that is asked about every object whose type is not known otherwise.

Raises:
    ValueError: for anything else, with its type and path (``out[1]['aux'][0]``): no value is passed through because it
        was not understood.
    RecursionError: beyond 1000 levels, and for a structure that contains itself.
    NotImplementedError: for pool= under an allocator that does not know its pools' memory (cudaMallocAsync).)doc";

constexpr char is_weak_ref_doc[] = R"doc(is_weak_ref(tensor, /)
--

Whether `tensor` is a weak ref made by weak_ref_tensors, or a view of one.)doc";

constexpr char owner_alive_doc[] = R"doc(owner_alive(tensor, /)
--

Whether the storage that a weak ref was made from still holds its memory.

A weak ref of a weak ref asks for the first one's owner. True for a tensor that is no weak ref: it owns its memory.
False does not mean that the memory is gone: a graph pool keeps the memory of dead tensors for its replays.)doc";

constexpr char describe_doc[] = R"doc(describe(out, /)
--

Return the structure's signature: "(2:T,[3:T])" is a tuple of length 2, of a tensor and a list of three.

T is a tensor; [n:...] a list, (n:...) a tuple, {n:...} a dict of length n, Name(n:...) any other container; the name of
the type anything else. Neighbours with equal signatures are written once. Takes any object and reads no data.)doc";

PyMethodDef methods[] = {
    {"weak_ref_tensors",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&weak_ref_tensors)),
     METH_FASTCALL | METH_KEYWORDS,
     weak_ref_tensors_doc},
    {"is_weak_ref", ask<weakref_ext::is_weak_ref>, METH_O, is_weak_ref_doc},
    {"owner_alive", ask<weakref_ext::owner_alive>, METH_O, owner_alive_doc},
    {"describe", describe, METH_O, describe_doc},
    {"owns", owns, METH_VARARGS, nullptr},
    {"leaves", leaves, METH_VARARGS, nullptr},
    {"map_tensors", map_tensors, METH_VARARGS, nullptr},
    {"register_type", register_type, METH_VARARGS, nullptr},
    {"set_resolver", set_resolver, METH_O, nullptr},
    {"op_call", weakref_ext::op_call, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "weakref_ext._C",
    "The native part of weakref_ext.",
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr && PyModule_AddFunctions(module, weakref_ext::trace_methods) != 0) {
    Py_CLEAR(module);
  }
  return module;
}
