#pragma once

// What a container is, for every traversal of Python structures: the exact type decides, once.

#include "torch_compat.h"

#include <cstdint>
#include <string>

namespace weakref_ext {

// Deeper than any output of a model, and at some 300 bytes of C stack a level small enough for any thread.
constexpr int kMaxDepth = 1000;

// Where a traversal stands: one link per container, on the C stack, written out only when it is asked for.
struct Step {
  enum class Written : uint8_t { Index, Key, Attribute, Text }; // [0]  ['aux']  .hidden  as it is
  const Step* parent;
  Written written = Written::Index;
  Py_ssize_t index = 0;
  PyObject* key = nullptr; // borrowed
};

// "out[1]['aux'].hidden"; the outer links of a very deep one are left out.
std::string path(const Step* step);

// False with a RecursionError set where `depth` is one too many.
bool enter(const Step* at, int depth);

// Sets the ValueError for a value of a type that no traversal understands.
void refuse_type(PyTypeObject* type, const Step* at);

enum class Kind : uint8_t {
  Unknown,
  Passthrough, // holds no tensor
  NamedTuple,
  StructSequence,
  Size, // torch.Size
  Dict,
  OrderedDict,
  DefaultDict,
  Custom, // through the Python functions flatten and unflatten
};

struct Entry {
  Kind kind = Kind::Unknown;
  PyObject* flatten = nullptr;   // flatten(object) -> (keys or None, children, context)
  PyObject* unflatten = nullptr; // unflatten(object, children, context) -> object of the same type
};

// False with a ValueError set for a dict key that is a tensor: keys stay as they are, and it would stay strong.
bool accept_key(PyObject* key, const Step* at);

// Sets the RuntimeError for a container that user code changed while it was traversed.
void changed_size(const Step* at);

// What objects of exactly this type are. The first question about a type asks the resolver, which is Python; Unknown is
// asked again each time, since a type may be registered later.
Entry entry_of(PyTypeObject* type);

// Whether objects of a type that is not known otherwise pass through in this call, by its `passthrough` argument: null,
// a tuple of types, or a function (type, path) -> bool. False with a Python error set if that fails.
bool passes(PyTypeObject* type, const Step* at, PyObject* passthrough);

// What `type` is from now on, as the resolver would answer: the name of a Kind, or (flatten, unflatten). False with a
// Python error set for another answer. Keeps the type and the functions alive for good: a freed type's address may
// return. Without `overrule`, what was registered before stands: by user code, while the resolver was asked.
bool register_type(PyTypeObject* type, PyObject* answer, bool overrule = true);

// resolver(type) -> None (not known) | "passthrough" | ... | (flatten, unflatten)
void set_resolver(PyObject* resolver);

// Calls visit(child, step) for every child of a container, until one returns false. A child is held while it is
// visited.
// `size`: what the caller saw and made room for; any allocation since may have run a finalizer that changed the list.
template <class Visit> bool each_of_list(PyObject* list, Py_ssize_t size, const Step* at, Visit&& visit) {
  Step step{at};
  for (; step.index < size; ++step.index) {
    const THPObjectPtr item = list_item(list, step.index);
    if (!item) {
      changed_size(at);
      return false;
    }
    if (!visit(const_cast<PyObject*>(item.get()), step)) {
      return false;
    }
  }
  return true;
}

// `keys`: how to write the elements' steps, in `written`'s way; or null.
template <class Visit>
bool each_of_tuple(PyObject* tuple, PyObject* keys, Step::Written written, const Step* at, Visit&& visit) {
  Step step{at, keys == nullptr ? Step::Written::Index : written};
  const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
  for (; step.index < size; ++step.index) {
    step.key = keys == nullptr ? nullptr : PyTuple_GET_ITEM(keys, step.index);
    if (!visit(PyTuple_GET_ITEM(tuple, step.index), step)) {
      return false;
    }
  }
  return true;
}

template <class Visit> bool each_of_dict(PyObject* dict, Kind kind, const Step* at, Visit&& visit) {
  Step step{at, Step::Written::Key};
  if (kind == Kind::OrderedDict) { // its order is not that of the dict underneath
    THPObjectPtr items(PyMapping_Items(dict));
    for (Py_ssize_t i = 0; items && i < PyList_GET_SIZE(items.get()); ++i) {
      step.key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 0);
      if (!accept_key(step.key, at) || !visit(PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 1), step)) {
        return false;
      }
    }
    return static_cast<bool>(items);
  }
  const Py_ssize_t size = PyDict_GET_SIZE(dict);
  for (Py_ssize_t position = 0;;) {
    PyObject* value = nullptr;
    {
      const ContainerLock lock(dict);
      if (PyDict_GET_SIZE(dict) == size) {
        if (PyDict_Next(dict, &position, &step.key, &value) == 0) {
          return true;
        }
        Py_INCREF(step.key);
        Py_INCREF(value);
      }
    }
    if (value == nullptr) {
      changed_size(at);
      return false;
    }
    const THPObjectPtr held_key(step.key), held_value(value);
    if (!accept_key(step.key, at) || !visit(value, step)) {
      return false;
    }
  }
}

// A custom container, taken apart by Entry::flatten and checked. Null children with a Python error set on failure.
struct Flat {
  THPObjectPtr keys; // a tuple of str, or null
  THPObjectPtr children;
  THPObjectPtr context;
};
Flat flatten(const Entry& entry, PyObject* in);

// The names of a named tuple's elements, one each: a new reference, or null with a Python error set.
THPObjectPtr field_names(PyObject* named_tuple, const Step* at);

} // namespace weakref_ext
