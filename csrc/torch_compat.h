#pragma once

// Everything that depends on the version of torch or CPython. Python side only.

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <string>
#include <vector>

namespace weakref_ext {

// A new reference, since another thread or a finalizer may shrink the list at any allocation; nullptr and no error set
// when the list is too short by now.
inline THPObjectPtr list_item(PyObject* list, Py_ssize_t i) {
#if PY_VERSION_HEX >= 0x030D0000
  THPObjectPtr item(PyList_GetItemRef(list, i));
  if (!item) {
    PyErr_Clear();
  }
  return item;
#else
  return THPObjectPtr(i < PyList_GET_SIZE(list) ? Py_NewRef(PyList_GET_ITEM(list, i)) : nullptr);
#endif
}

// Keeps other threads from changing a list or dict where there is no GIL to do it, as long as no Python code runs and
// nothing is waited for.
class ContainerLock {
 public:
#ifdef Py_GIL_DISABLED
  explicit ContainerLock(PyObject* container) {
    PyCriticalSection_Begin(&section_, container);
  }
  ~ContainerLock() {
    PyCriticalSection_End(&section_);
  }
  ContainerLock(const ContainerLock&) = delete;
  ContainerLock& operator=(const ContainerLock&) = delete;

 private:
  PyCriticalSection section_;
#else
  explicit ContainerLock(PyObject* /*container*/) noexcept {
  }
#endif
};

// Whether nobody holds `object` beyond these references. Unknown without the GIL: a count is then the sum of two that
// are read one after the other, and a reference that moves from thread to thread between them is missed.
inline bool held_only_by(Py_ssize_t references, PyObject* object) {
#ifdef Py_GIL_DISABLED
  static_cast<void>(references), static_cast<void>(object);
  return false;
#else
  return Py_REFCNT(object) <= references;
#endif
}

// Guards the tables of types where there is no GIL to do it. No Python code may run under it.
class TypesLock {
 public:
#ifdef Py_GIL_DISABLED
  TypesLock() {
    PyMutex_Lock(&mutex_);
  }
  ~TypesLock() {
    PyMutex_Unlock(&mutex_);
  }
  TypesLock(const TypesLock&) = delete;
  TypesLock& operator=(const TypesLock&) = delete;

 private:
  static inline PyMutex mutex_ = {};
#else
  TypesLock() noexcept {
  }
#endif
};

// True for torch.Tensor and its subclasses, by type alone: torch's own check asks the metaclass, which runs user code.
inline bool is_tensor_type(PyTypeObject* type) {
  return THPVariable_CheckTypeExact(type) || PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// The Python tensor of an alias of a tensor of this type, as detach() would type it: a Parameter gives a plain tensor,
// any other subclass (without __torch_dispatch__) is kept.
inline PyObject* wrap(at::Tensor&& alias, PyTypeObject* type) {
  if (THPVariable_CheckTypeExact(type) || PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(ParameterClass))) {
    return THPVariable_Wrap(std::move(alias));
  }
  return THPVariable_Wrap(alias, type);
}

// Holds the GIL. pybind11's own looks its internals up first, which takes three times as long.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {
  }
  ~Gil() {
    PyGILState_Release(state_);
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Carries a Python object through the dispatcher. torch's own holder needs a symbol that torch 2.13 does not export.
class PyObjectHolder final : public c10::ivalue::PyObjectHolder {
 public:
  explicit PyObjectHolder(THPObjectPtr object) : object_(object.release()) {
  }

  // The dispatcher may drop the last reference without the GIL.
  ~PyObjectHolder() override {
    const Gil gil;
    Py_DECREF(object_);
  }

  PyObject* getPyObject() override {
    return object_;
  }
  c10::InferredType tryToInferType() override {
    return c10::InferredType("a live Python object has no TorchScript type");
  }
  c10::IValue toIValue(const c10::TypePtr& type, std::optional<int32_t> /*N*/) override {
    TORCH_CHECK_TYPE(false, "weakref_ext: a live Python object cannot become a TorchScript ", type->repr_str());
  }
  std::string toStr() override {
    return "<the result of weak_ref_tensors>";
  }
  std::vector<at::Tensor> extractTensors() override {
    return {}; // weak refs: there is nothing to keep alive or to record on a stream
  }

 private:
  PyObject* object_;
};

inline c10::intrusive_ptr<c10::ivalue::PyObjectHolder> hold(THPObjectPtr object) {
  return c10::make_intrusive<PyObjectHolder>(std::move(object));
}

} // namespace weakref_ext
