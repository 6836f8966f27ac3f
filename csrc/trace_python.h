#pragma once

#include <torch/csrc/python_headers.h>

namespace weakref_ext {

// The functions of weakref_ext._C that the sanitizer calls.
extern PyMethodDef trace_methods[];

} // namespace weakref_ext
