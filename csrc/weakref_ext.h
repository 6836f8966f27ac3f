#pragma once

// The C++ API, for LibTorch programs: weak_ref_tensors(), is_weak_ref(), owner_alive(). The same walk is the operator
// weakref_ext::weak_ref_tensors.ivalue, (Any out) -> Any.

#include "alias.h"
#include "walk_ivalue.h"
