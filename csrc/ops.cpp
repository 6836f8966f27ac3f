#include "walk_ivalue.h"

#include <ATen/core/jit_type.h>
#include <torch/library.h>

namespace weakref_ext {
namespace {

// The schema parser does not know PyObject, so this schema is built by hand.
c10::FunctionSchema python_schema() {
  const auto object = c10::PyObjectType::get();
  return c10::FunctionSchema(
      "weakref_ext::weak_ref_tensors", "", {c10::Argument("out", object)}, {c10::Argument("", object)});
}

void boxed(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const c10::IValue argument = torch::jit::pop(*stack);
  torch::jit::push(*stack, weak_ref_tensors(argument));
}

} // namespace

// Overloads are tried in this order. The kernel of the first is in walk_python.cpp: a library without Python has the
// second only.
TORCH_LIBRARY(weakref_ext, m) {
  m.def(python_schema());
  m.def("weak_ref_tensors.ivalue(Any out) -> Any");
  m.impl("weak_ref_tensors.ivalue",
         c10::DispatchKey::CompositeExplicitAutograd,
         torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

} // namespace weakref_ext
