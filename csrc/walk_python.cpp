#include "walk_python.h"

#include "alias.h"
#include "torch_compat.h"

#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace weakref_ext {
namespace {

// Deeper than any output of a model, and at some 200 bytes of C stack a level small enough for any thread.
constexpr int kMaxDepth = 1000;

// Where the walk stands: one link per container, on the C stack, written out only when something is refused.
struct Step {
  const Step* parent;
  Py_ssize_t index;
};

std::string path(const Step* step) {
  constexpr size_t kShown = 20;
  std::vector<Py_ssize_t> indices;
  for (; step != nullptr && indices.size() < kShown; step = step->parent) {
    indices.push_back(step->index);
  }
  std::string text = step == nullptr ? "out" : "out[...]";
  for (auto index = indices.rbegin(); index != indices.rend(); ++index) {
    text += c10::str("[", *index, "]");
  }
  return text;
}

// Types that pass through, by identity: a lookup runs no user code. Never freed, so that no static destructor touches
// Python.
ska::flat_hash_map<PyTypeObject*, bool>& passthrough() {
  static auto* types = new ska::flat_hash_map<PyTypeObject*, bool>();
  return *types;
}

bool passes(PyTypeObject* type) {
  const TypesLock lock;
  return passthrough().count(type) != 0;
}

PyObject* resolver = nullptr; // set once, at import

class Walk {
 public:
  THPObjectPtr visit(PyObject* in, const Step* at, int depth, Py_ssize_t references) {
    PyTypeObject* type = Py_TYPE(in);
    if (THPVariable_CheckTypeExact(type)) {
      return tensor(in, at, references);
    }
    if (type == &PyList_Type) {
      return list(in, at, depth);
    }
    if (type == &PyTuple_Type) {
      return tuple(in, at, depth);
    }
    if (PyLong_Check(in)) {
      return THPObjectPtr(Py_NewRef(in));
    }
    return other(in, at, references);
  }

 private:
  // `references`: how many references to `in` the walk itself accounts for; with more, it may be met again.
  THPObjectPtr tensor(PyObject* in, const Step* at, Py_ssize_t references) {
    const at::Tensor& source = THPVariable_Unpack(in);
    if (const char* reason = refusal(source)) {
      PyErr_Format(PyExc_ValueError, "Invalid type for tensors: %R at %s: %s.", Py_TYPE(in), path(at).c_str(), reason);
      return THPObjectPtr();
    }
    return THPObjectPtr(THPVariable_Wrap(aliases_.of(source, Py_REFCNT(in) > references)));
  }

  THPObjectPtr list(PyObject* in, const Step* at, int depth) {
    if (!enter(at, depth)) {
      return THPObjectPtr();
    }
    const Py_ssize_t size = PyList_GET_SIZE(in);
    THPObjectPtr out(PyList_New(size));
    if (!out) {
      return out;
    }
    Step step{at, 0};
    for (Py_ssize_t i = 0; i < size; ++i) {
      step.index = i;
      THPObjectPtr item = list_item(in, i);
      THPObjectPtr mapped;
      if (item) {
        mapped = visit(item, &step, depth + 1, 2);
      } else {
        PyErr_Format(PyExc_RuntimeError, "%s: the list lost items during the walk", path(at).c_str());
      }
      if (!mapped) {
        return THPObjectPtr();
      }
      PyList_SET_ITEM(out.get(), i, mapped.release());
    }
    return out;
  }

  THPObjectPtr tuple(PyObject* in, const Step* at, int depth) {
    if (!enter(at, depth)) {
      return THPObjectPtr();
    }
    const Py_ssize_t size = PyTuple_GET_SIZE(in);
    THPObjectPtr out(PyTuple_New(size));
    if (!out) {
      return out;
    }
    Step step{at, 0};
    for (Py_ssize_t i = 0; i < size; ++i) {
      step.index = i;
      THPObjectPtr mapped = visit(PyTuple_GET_ITEM(in, i), &step, depth + 1, 1);
      if (!mapped) {
        return THPObjectPtr();
      }
      PyTuple_SET_ITEM(out.get(), i, mapped.release());
    }
    return out;
  }

  THPObjectPtr other(PyObject* in, const Step* at, Py_ssize_t references) {
    PyTypeObject* type = Py_TYPE(in);
    if (is_tensor_type(type)) {
      return tensor(in, at, references);
    }
    if (passes(type) || resolve(type)) {
      return THPObjectPtr(Py_NewRef(in));
    }
    if (!PyErr_Occurred()) {
      PyErr_Format(PyExc_ValueError,
                   "Invalid type for tensors: %R at %s. Supported are tensors, list, tuple, int and layer names; "
                   "take this value out of the structure, or register_passthrough() its type if it holds no tensor.",
                   type,
                   path(at).c_str());
    }
    return THPObjectPtr();
  }

  static bool resolve(PyTypeObject* type) {
    THPObjectPtr answer(resolver == nullptr ? nullptr
                                            : PyObject_CallOneArg(resolver, reinterpret_cast<PyObject*>(type)));
    if (answer && PyObject_IsTrue(answer) == 1) {
      register_passthrough(type);
      return true;
    }
    return false;
  }

  static bool enter(const Step* at, int depth) {
    if (C10_LIKELY(depth < kMaxDepth)) {
      return true;
    }
    PyErr_Format(PyExc_RecursionError,
                 "%s is nested more than %d levels deep: does the structure contain itself?",
                 path(at).c_str(),
                 kMaxDepth);
    return false;
  }

  Aliases aliases_;
};

// torch.ops.weakref_ext.weak_ref_tensors.default: (PyObject out) -> PyObject
void boxed(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const pybind11::gil_scoped_acquire gil; // the dispatcher released it
  const c10::IValue argument = torch::jit::pop(*stack);
  THPObjectPtr result(weak_ref_tensors(argument.toPyObjectHolder()->getPyObject()));
  if (!result) {
    throw python_error();
  }
  stack->emplace_back(hold(std::move(result)));
}

TORCH_LIBRARY_IMPL(weakref_ext, CompositeExplicitAutograd, m) {
  m.impl("weak_ref_tensors", torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

} // namespace

PyObject* weak_ref_tensors(PyObject* out) {
  HANDLE_TH_ERRORS
  if (C10_UNLIKELY(disabled())) {
    return Py_NewRef(out);
  }
  // The caller's own references to the outermost object are not known, and it is met again only from inside itself.
  return Walk().visit(out, nullptr, 0, PY_SSIZE_T_MAX).release();
  END_HANDLE_TH_ERRORS
}

void register_passthrough(PyTypeObject* type) {
  const TypesLock lock;
  if (passthrough().emplace(type, true).second) {
    Py_INCREF(type);
  }
}

void set_resolver(PyObject* callable) {
  Py_XSETREF(resolver, Py_XNewRef(callable));
}

} // namespace weakref_ext
