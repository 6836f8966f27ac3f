#pragma once

#include <torch/csrc/python_headers.h>

namespace weakref_ext {

// A function for torch.ops to call instead of `torch_call`, its own way to the operator: it walks at once, or passes
// the call on where somebody might want to see or change it. A new reference, or nullptr with a Python error set.
PyObject* op_call(PyObject* module, PyObject* torch_call);

} // namespace weakref_ext
