#pragma once

#include <c10/core/Storage.h>
#include <torch/csrc/python_headers.h>

#include <functional>

namespace weakref_ext {

struct Options {
  // Which storages' tensors to weaken; empty: all. The others stay as they are, or are refused.
  std::function<bool(const c10::Storage&)> owns;
  bool refuse_outside = false;
  bool keep_cpu = false; // CPU tensors stay as they are
  // Borrowed, or null: see containers.h.
  PyObject* passthrough = nullptr;
};

// The structure `out` with every tensor replaced by a non-owning alias: a new reference, or nullptr with a Python error
// set and every reference as before. Needs the GIL.
PyObject* weak_ref_tensors(PyObject* out, const Options& options = {});

// From now on weak_ref_tensors calls listener(result) before it returns, until it is replaced; nullptr: nobody. Calls
// from C++ (the ivalue overload) are not heard. Needs the GIL.
void set_listener(PyObject* listener);

// The same traversal with every tensor replaced by function(path, tensor).
PyObject* map_tensors(PyObject* out, PyObject* function, PyObject* passthrough);

} // namespace weakref_ext
