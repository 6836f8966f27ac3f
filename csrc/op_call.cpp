#include "op_call.h"

#include "torch_compat.h"
#include "walk_python.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

namespace weakref_ext {
namespace {

// Modes, functorch, functionalization, tracing and fake tensors each include a key of their own; the profiler and other
// observers are callbacks.
bool observed() noexcept {
  constexpr auto unobserved = c10::default_included_set | c10::autocast_dispatch_keyset;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !(included - unobserved).empty() || at::impl::torch_function_mode_enabled() ||
         at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

bool overloads(PyObject* object) {
  return !THPVariable_CheckTypeExact(Py_TYPE(object)) && is_tensor_type(Py_TYPE(object));
}

// Whether torch would look for a __torch_function__ here: on an argument, and on the elements of a list or tuple.
bool may_overload(PyObject* out) {
  if (PyList_Check(out) || PyTuple_Check(out)) {
    const ContainerLock lock(out); // the items are borrowed
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); ++i) {
      if (overloads(PySequence_Fast_GET_ITEM(out, i))) {
        return true;
      }
    }
    return false;
  }
  return overloads(out);
}

PyObject* call(PyObject* torch_call, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (count == 1 && names == nullptr && !observed() && !may_overload(args[0])) {
    return weak_ref_tensors(args[0]);
  }
  return PyObject_Vectorcall(torch_call, args, static_cast<size_t>(count), names);
}

PyMethodDef definition{"weak_ref_tensors",
                       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                       METH_FASTCALL | METH_KEYWORDS,
                       nullptr};

} // namespace

PyObject* op_call(PyObject* /*module*/, PyObject* torch_call) {
  THPObjectPtr module(PyObject_GetAttrString(torch_call, "__module__"));
  return module ? PyCFunction_NewEx(&definition, torch_call, module) : nullptr;
}

} // namespace weakref_ext
