#pragma once

#include <torch/csrc/python_headers.h>

namespace weakref_ext {

// [(path, tensor), ...] of every tensor in the structure, wrappers taken apart: a new reference, or nullptr with a
// Python error set.
PyObject* leaves(PyObject* out, PyObject* passthrough);

// The structure's signature as str: "(2:T,[3:T])". Takes any object.
PyObject* describe(PyObject* out);

} // namespace weakref_ext
