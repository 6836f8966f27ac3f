#include "walk_python.h"

#include "alias.h"
#include "containers.h"

#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <atomic>
#include <utility>

namespace weakref_ext {
namespace {

// Maps a structure onto one of the same types. `Leaf` makes the new tensors: leaf(tensor, at). One tensor gives one.
template <class Leaf> class Walk {
 public:
  Walk(Leaf& leaf, PyObject* passthrough) : leaf_(leaf), passthrough_(passthrough) {
  }

  // `references`: how many references to `in` the walk itself accounts for.
  THPObjectPtr visit(PyObject* in, const Step* at, int depth, Py_ssize_t references) {
    PyTypeObject* type = Py_TYPE(in);
    if (THPVariable_CheckTypeExact(type)) {
      // One that nobody else holds is met only here.
      return held_only_by(references, in) ? leaf_(in, at) : once(in, [&] { return leaf_(in, at); });
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
    return other(in, at, depth);
  }

 private:
  THPObjectPtr list(PyObject* in, const Step* at, int depth) {
    const Py_ssize_t size = PyList_GET_SIZE(in);
    THPObjectPtr out(enter(at, depth) ? PyList_New(size) : nullptr);
    const bool done = out && each_of_list(in, size, at, [&](PyObject* item, const Step& step) {
                        THPObjectPtr mapped = visit(item, &step, depth + 1, 2);
                        PyList_SET_ITEM(out.get(), step.index, mapped.get());
                        return mapped.release() != nullptr;
                      });
    return done ? std::move(out) : THPObjectPtr();
  }

  THPObjectPtr tuple(PyObject* in, const Step* at, int depth) {
    return fill(THPObjectPtr(PyTuple_New(PyTuple_GET_SIZE(in))), in, nullptr, Step::Written::Index, at, depth);
  }

  // Fills `out`, a fresh tuple or instance of a tuple type, with what the elements of `in` become.
  THPObjectPtr fill(THPObjectPtr out, PyObject* in, PyObject* keys, Step::Written written, const Step* at, int depth) {
    const bool done =
        out && enter(at, depth) && each_of_tuple(in, keys, written, at, [&](PyObject* element, const Step& step) {
          THPObjectPtr mapped = visit(element, &step, depth + 1, 1);
          PyTuple_SET_ITEM(out.get(), step.index, mapped.get());
          return mapped.release() != nullptr;
        });
    return done ? std::move(out) : THPObjectPtr();
  }

  THPObjectPtr other(PyObject* in, const Step* at, int depth) {
    PyTypeObject* type = Py_TYPE(in);
    // A subclass that is sizes and strides over a storage is a leaf like any tensor; a wrapper is a container.
    const bool is_tensor = is_tensor_type(type);
    if (is_tensor && refusal(THPVariable_Unpack(in)) == nullptr) {
      return once(in, [&] { return leaf_(in, at); });
    }
    const Entry entry = entry_of(type);
    switch (entry.kind) {
    case Kind::Passthrough:
      return THPObjectPtr(Py_NewRef(in));
    case Kind::Dict:
    case Kind::DefaultDict:
    case Kind::OrderedDict:
      return dict(in, entry.kind, at, depth);
    case Kind::NamedTuple:
      return named_tuple(in, at, depth);
    case Kind::StructSequence: {
      THPObjectPtr items = tuple(in, at, depth);
      return THPObjectPtr(items ? PyObject_CallOneArg(reinterpret_cast<PyObject*>(type), items) : nullptr);
    }
    case Kind::Size: // walked for what is refused: a SymInt
      return THPObjectPtr(tuple(in, at, depth) ? Py_NewRef(in) : nullptr);
    case Kind::Custom:
      return is_tensor ? once(in, [&] { return custom(in, entry, at, depth); }) : custom(in, entry, at, depth);
    case Kind::Unknown:
      break;
    }
    if (PyErr_Occurred() != nullptr) {
      return THPObjectPtr();
    }
    if (is_tensor) {
      return leaf_(in, at); // refuses it, with the reason
    }
    if (passes(type, at, passthrough_)) {
      return THPObjectPtr(Py_NewRef(in));
    }
    if (PyErr_Occurred() == nullptr) {
      refuse_type(type, at);
    }
    return THPObjectPtr();
  }

  THPObjectPtr dict(PyObject* in, Kind kind, const Step* at, int depth) {
    THPObjectPtr out(enter(at, depth) ? empty_like(in, kind) : nullptr);
    const auto set_item = kind == Kind::Dict ? &PyDict_SetItem : &PyObject_SetItem;
    const bool done = out && each_of_dict(in, kind, at, [&](PyObject* value, const Step& step) {
                        THPObjectPtr mapped = visit(value, &step, depth + 1, 2);
                        return mapped && set_item(out, step.key, mapped) == 0;
                      });
    return done ? std::move(out) : THPObjectPtr();
  }

  static PyObject* empty_like(PyObject* in, Kind kind) {
    if (kind == Kind::Dict) {
      return PyDict_New();
    }
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(in));
    if (kind == Kind::OrderedDict) {
      return PyObject_CallNoArgs(type);
    }
    THPObjectPtr factory(PyObject_GetAttrString(in, "default_factory"));
    return factory ? PyObject_CallOneArg(type, factory) : nullptr;
  }

  // Without running the class's own __new__; an instance's attributes come along.
  THPObjectPtr named_tuple(PyObject* in, const Step* at, int depth) {
    PyTypeObject* type = Py_TYPE(in);
    THPObjectPtr names = field_names(in, at);
    THPObjectPtr out(names ? type->tp_alloc(type, PyTuple_GET_SIZE(in)) : nullptr);
    out = fill(std::move(out), in, names, Step::Written::Attribute, at, depth);
    if (out && type->tp_dictoffset != 0) {
      THPObjectPtr attributes(PyObject_GetAttrString(in, "__dict__"));
      THPObjectPtr copies(attributes ? PyObject_GetAttrString(out, "__dict__") : nullptr);
      if (!copies || PyDict_Update(copies, attributes) != 0) {
        return THPObjectPtr();
      }
    }
    return out;
  }

  THPObjectPtr custom(PyObject* in, const Entry& entry, const Step* at, int depth) {
    Flat flat = flatten(entry, in);
    if (!flat.children) {
      return THPObjectPtr();
    }
    THPObjectPtr out(PyTuple_New(PyTuple_GET_SIZE(flat.children.get())));
    THPObjectPtr mapped = fill(std::move(out), flat.children, flat.keys, Step::Written::Text, at, depth);
    return THPObjectPtr(
        mapped ? PyObject_CallFunctionObjArgs(entry.unflatten, in, mapped.get(), flat.context.get(), nullptr)
               : nullptr);
  }

  template <class Make> THPObjectPtr once(PyObject* in, Make&& make) {
    if (const THPObjectPtr* made = made_.find(in)) {
      return THPObjectPtr::dup(made->get());
    }
    THPObjectPtr out = make();
    if (out) {
      made_.add(in, THPObjectPtr::dup(in), THPObjectPtr::dup(out.get()));
    }
    return out;
  }

  Leaf& leaf_;
  PyObject* passthrough_;
  Memo<THPObjectPtr> made_;
};

class WeakLeaf {
 public:
  explicit WeakLeaf(const Options& options) : options_(options) {
  }

  THPObjectPtr operator()(PyObject* in, const Step* at) {
    const at::Tensor& source = THPVariable_Unpack(in);
    if (C10_UNLIKELY(options_.keep_cpu) && source.device().is_cpu()) {
      return THPObjectPtr(Py_NewRef(in));
    }
    if (const char* reason = refusal(source)) {
      PyErr_Format(PyExc_ValueError, "Invalid type for tensors: %R at %s: %s.", Py_TYPE(in), path(at).c_str(), reason);
      return THPObjectPtr();
    }
    if (C10_UNLIKELY(options_.owns != nullptr) && source.storage().nbytes() != 0 && !options_.owns(source.storage())) {
      return outside(in, at, source);
    }
    return THPObjectPtr(wrap(aliases_.of(source), Py_TYPE(in)));
  }

 private:
  THPObjectPtr outside(PyObject* in, const Step* at, const at::Tensor& source) const {
    if (!options_.refuse_outside) {
      return THPObjectPtr(Py_NewRef(in));
    }
    PyErr_Format(
        PyExc_ValueError,
        "%s is outside the graph pool: its memory, on %s, was not allocated by a capture into that pool, and a "
        "weak ref of it could dangle. Make it inside the capture, or keep it strong with outside=\"keep\".",
        path(at).c_str(),
        source.device().str().c_str());
    return THPObjectPtr();
  }

  const Options& options_;
  Aliases aliases_;
};

class CallLeaf {
 public:
  explicit CallLeaf(PyObject* function) : function_(function) {
  }

  THPObjectPtr operator()(PyObject* in, const Step* at) const {
    THPObjectPtr text(PyUnicode_FromString(path(at).c_str()));
    return THPObjectPtr(text ? PyObject_CallFunctionObjArgs(function_, text.get(), in, nullptr) : nullptr);
  }

 private:
  PyObject* function_;
};

// Not HANDLE_TH_ERRORS: its warning buffer costs as much as a tensor, and nothing here warns.
template <class Leaf> PyObject* run(PyObject* out, Leaf leaf, PyObject* passthrough) {
  try {
    // The caller's references to the outermost object are not known, and it is met again only from inside itself.
    return Walk<Leaf>(leaf, passthrough).visit(out, nullptr, 0, PY_SSIZE_T_MAX).release();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// torch.ops.weakref_ext.weak_ref_tensors.default: (PyObject out) -> PyObject
void boxed(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const Gil gil; // the dispatcher released it
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

// Whether a call has nothing to do but to make aliases: the one flag that it reads, so that a listener costs nothing
// while there is none. False before the first call, with WEAKREF_EXT_DISABLE, and with a listener.
std::atomic<bool> plain{false};
PyObject* heard_by = nullptr; // owned

PyObject* not_plain(PyObject* out, const Options& options) {
  if (disabled()) {
    return Py_NewRef(out);
  }
  THPObjectPtr weak(run(out, WeakLeaf(options), options.passthrough)), listener;
  {
    const TypesLock lock;
    listener = Py_XNewRef(heard_by);
    plain.store(listener.get() == nullptr, std::memory_order_relaxed);
  }
  if (weak && listener && !THPObjectPtr(PyObject_CallOneArg(listener, weak))) {
    return nullptr;
  }
  return weak.release();
}

} // namespace

PyObject* weak_ref_tensors(PyObject* out, const Options& options) {
  if (C10_LIKELY(plain.load(std::memory_order_relaxed))) {
    return run(out, WeakLeaf(options), options.passthrough);
  }
  return not_plain(out, options);
}

void set_listener(PyObject* listener) {
  THPObjectPtr before;
  const TypesLock lock;
  before = std::exchange(heard_by, Py_XNewRef(listener));
  plain.store(false, std::memory_order_relaxed);
}

PyObject* map_tensors(PyObject* out, PyObject* function, PyObject* passthrough) {
  return run(out, CallLeaf(function), passthrough);
}

} // namespace weakref_ext
