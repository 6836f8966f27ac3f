#pragma once

#include <ATen/core/ivalue.h>

namespace weakref_ext {

// The same as the walk over Python objects, for C++ and TorchScript: tensors inside lists, tuples, named tuples and
// dicts become non-owning aliases, int and bool pass, every container keeps its type. Throws c10::ValueError with the
// path of what it refuses.
c10::IValue weak_ref_tensors(const c10::IValue& out);

} // namespace weakref_ext
