#include "trace_python.h"

#include "walk_python.h"

#ifdef WEAKREF_EXT_CUDA
#include "cuda/pool_trace.h"
#endif

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace weakref_ext {
namespace {

PyObject* set_listener(PyObject* /*module*/, PyObject* listener) {
  weakref_ext::set_listener(listener == Py_None ? nullptr : listener);
  Py_RETURN_NONE;
}

#ifdef WEAKREF_EXT_CUDA

// All of them without the GIL: a thread may hold the allocator's lock, which the ring's is taken under, and wait for
// the GIL.

PyObject* trace_start(PyObject* /*module*/, PyObject* capacity) {
  HANDLE_TH_ERRORS
  const size_t events = PyLong_AsSize_t(capacity);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  {
    const pybind11::gil_scoped_release no_gil;
    cuda::start_trace(events);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* trace_stop(PyObject* /*module*/, PyObject* /*none*/) {
  cuda::stop_trace();
  Py_RETURN_NONE;
}

PyObject* trace_position(PyObject* /*module*/, PyObject* /*none*/) {
  uint64_t position = 0;
  {
    const pybind11::gil_scoped_release no_gil;
    position = cuda::trace_position();
  }
  return PyLong_FromUnsignedLongLong(position);
}

PyObject* trace_read(PyObject* /*module*/, PyObject* from) {
  HANDLE_TH_ERRORS
  uint64_t first = PyLong_AsUnsignedLongLong(from);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  std::vector<cuda::PoolEvent> events;
  {
    const pybind11::gil_scoped_release no_gil;
    std::tie(first, events) = cuda::read_trace(first);
  }
  return Py_BuildValue("(KN)",
                       static_cast<unsigned long long>(first),
                       PyBytes_FromStringAndSize(reinterpret_cast<const char*>(events.data()),
                                                 static_cast<Py_ssize_t>(events.size() * sizeof(cuda::PoolEvent))));
  END_HANDLE_TH_ERRORS
}

PyObject* reserved_bytes(PyObject* /*module*/, PyObject* index) {
  HANDLE_TH_ERRORS
  const long device = PyLong_AsLong(index);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  int64_t bytes = 0;
  {
    const pybind11::gil_scoped_release no_gil;
    bytes = cuda::reserved_bytes(static_cast<c10::DeviceIndex>(device));
  }
  return PyLong_FromLongLong(bytes);
  END_HANDLE_TH_ERRORS
}

#endif

} // namespace

PyMethodDef trace_methods[] = {
    {"set_listener", set_listener, METH_O, nullptr},
#ifdef WEAKREF_EXT_CUDA
    {"trace_start", trace_start, METH_O, nullptr},
    {"trace_stop", trace_stop, METH_NOARGS, nullptr},
    {"trace_position", trace_position, METH_NOARGS, nullptr},
    {"trace_read", trace_read, METH_O, nullptr},
    {"reserved_bytes", reserved_bytes, METH_O, nullptr},
#endif
    {nullptr, nullptr, 0, nullptr},
};

} // namespace weakref_ext
