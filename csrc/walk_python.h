#pragma once

#include <torch/csrc/python_headers.h>

namespace weakref_ext {

// The structure `out` with every tensor replaced by a non-owning alias: a new reference, or nullptr with a Python error
// set and every reference as before. Needs the GIL.
PyObject* weak_ref_tensors(PyObject* out);

// Objects of exactly this type pass through the walk. Keeps the type alive.
void register_passthrough(PyTypeObject* type);

// Asked once per walk and unknown type, as resolver(type) -> bool: whether to register the type as a pass-through.
void set_resolver(PyObject* resolver);

} // namespace weakref_ext
