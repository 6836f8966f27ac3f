#include "alias.h"
#include "torch_compat.h"
#include "walk_python.h"

#include <torch/csrc/Exceptions.h>

namespace {

PyObject* weak_ref_tensors(PyObject* /*module*/, PyObject* out) {
  return weakref_ext::weak_ref_tensors(out);
}

using Query = bool (*)(const at::Tensor&);

template <Query query> PyObject* ask(PyObject* /*module*/, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!weakref_ext::is_tensor_type(Py_TYPE(tensor))) {
    return PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, got %R", Py_TYPE(tensor));
  }
  return PyBool_FromLong(query(THPVariable_Unpack(tensor)));
  END_HANDLE_TH_ERRORS
}

PyObject* register_passthrough(PyObject* /*module*/, PyObject* type) {
  if (!PyType_Check(type)) {
    return PyErr_Format(PyExc_TypeError, "expected a type, got %R", type);
  }
  weakref_ext::register_passthrough(reinterpret_cast<PyTypeObject*>(type));
  Py_RETURN_NONE;
}

PyObject* set_resolver(PyObject* /*module*/, PyObject* resolver) {
  weakref_ext::set_resolver(resolver);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(weak_ref_tensors_doc, R"(weak_ref_tensors(out, /)
--

Return the structure `out` with every tensor replaced by a non-owning alias.

Lists and tuples, nested to any depth, give new lists and tuples; int, bool and layer names pass through as the same
object. An alias has the same data pointer, sizes, strides, storage offset, dtype, device, conj and neg bits as its
source, does not require grad, and does not keep the memory allocated. A tensor that occurs twice gives one alias;
tensors that share a storage give aliases that share one.

An alias is valid for as long as something else keeps its memory and nobody else was handed it: read it, or clone it,
before the graph pool that owns the memory goes or another capture that was given the block replays.

Raises ValueError for anything else, with its type and path (``out[1][0]``): no value is passed through because it was
not understood. Raises RecursionError beyond 1000 levels, and for a structure that contains itself.)");

PyDoc_STRVAR(is_weak_ref_doc, R"(is_weak_ref(tensor, /)
--

Whether `tensor` is a weak ref made by weak_ref_tensors, or a view of one.)");

PyDoc_STRVAR(owner_alive_doc, R"(owner_alive(tensor, /)
--

Whether the storage that a weak ref was made from still holds its memory.

A weak ref of a weak ref asks for the first one's owner. True for a tensor that is no weak ref: it owns its memory.
False does not mean that the memory is gone: a graph pool keeps the memory of dead tensors for its replays.)");

PyMethodDef methods[] = {
    {"weak_ref_tensors", weak_ref_tensors, METH_O, weak_ref_tensors_doc},
    {"is_weak_ref", ask<weakref_ext::is_weak_ref>, METH_O, is_weak_ref_doc},
    {"owner_alive", ask<weakref_ext::owner_alive>, METH_O, owner_alive_doc},
    {"register_passthrough", register_passthrough, METH_O, nullptr},
    {"set_resolver", set_resolver, METH_O, nullptr},
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
  return PyModule_Create(&definition);
}
