#include "containers.h"

#include <c10/util/flat_hash_map.h>

#include <array>
#include <utility>
#include <vector>

namespace weakref_ext {
namespace {

// Never freed, so that no static destructor touches Python.
ska::flat_hash_map<PyTypeObject*, Entry>& registry() {
  static auto* types = new ska::flat_hash_map<PyTypeObject*, Entry>{
      {&PyDict_Type, Entry{Kind::Dict}},
      {&PyODict_Type, Entry{Kind::OrderedDict}},
  };
  return *types;
}

PyObject* resolver = nullptr; // owned

THPObjectPtr held_resolver() {
  const TypesLock lock;
  return THPObjectPtr(Py_XNewRef(resolver));
}

Kind kind_named(PyObject* name) {
  static constexpr std::array<std::pair<const char*, Kind>, 5> kinds{{
      {"passthrough", Kind::Passthrough},
      {"namedtuple", Kind::NamedTuple},
      {"structseq", Kind::StructSequence},
      {"size", Kind::Size},
      {"defaultdict", Kind::DefaultDict},
  }};
  for (const auto& [text, kind] : kinds) {
    if (PyUnicode_CompareWithASCIIString(name, text) == 0) {
      return kind;
    }
  }
  return Kind::Unknown;
}

std::string text_of(PyObject* text) {
  const char* utf8 = text != nullptr && PyUnicode_Check(text) ? PyUnicode_AsUTF8(text) : nullptr;
  if (utf8 == nullptr) {
    PyErr_Clear(); // a path is written while another error is being made
    return "?";
  }
  return utf8;
}

std::string written(const Step& step) {
  switch (step.written) {
  case Step::Written::Index:
    return "[" + std::to_string(step.index) + "]";
  case Step::Written::Key:
    return "[" + text_of(THPObjectPtr(PyObject_Repr(step.key)).get()) + "]";
  case Step::Written::Attribute:
    return "." + text_of(step.key);
  case Step::Written::Text:
    return text_of(step.key);
  }
  return "";
}

} // namespace

std::string path(const Step* step) {
  constexpr size_t kShown = 20;
  std::vector<const Step*> steps;
  for (; step != nullptr && steps.size() < kShown; step = step->parent) {
    steps.push_back(step);
  }
  std::string text = step == nullptr ? "out" : "out[...]";
  for (auto link = steps.rbegin(); link != steps.rend(); ++link) {
    text += written(**link);
  }
  return text;
}

bool enter(const Step* at, int depth) {
  if (C10_LIKELY(depth < kMaxDepth)) {
    return true;
  }
  PyErr_Format(PyExc_RecursionError,
               "%s is nested more than %d levels deep: does the structure contain itself?",
               path(at).c_str(),
               kMaxDepth);
  return false;
}

void refuse_type(PyTypeObject* type, const Step* at) {
  PyErr_Format(PyExc_ValueError,
               "Invalid type for tensors: %R at %s. Supported are tensors, int, layer names, list, tuple, dict, named "
               "tuples, dataclasses and pytree nodes; take this value out of the structure, or tell what it is with "
               "register_container(), or, if it holds no tensor, register_passthrough().",
               type,
               path(at).c_str());
}

bool accept_key(PyObject* key, const Step* at) {
  if (C10_LIKELY(!is_tensor_type(Py_TYPE(key)))) {
    return true;
  }
  PyErr_Format(
      PyExc_ValueError,
      "Invalid type for tensors: %R as a dict key at %s: its memory would stay allocated; key the dict by int or "
      "str.",
      Py_TYPE(key),
      path(at).c_str());
  return false;
}

void changed_size(const Step* at) {
  PyErr_Format(PyExc_RuntimeError, "%s changed size during the walk", path(at).c_str());
}

Entry entry_of(PyTypeObject* type) {
  {
    const TypesLock lock;
    const auto found = registry().find(type);
    if (C10_LIKELY(found != registry().end())) {
      return found->second;
    }
  }
  THPObjectPtr resolve = held_resolver();
  THPObjectPtr answer(resolve ? PyObject_CallOneArg(resolve, reinterpret_cast<PyObject*>(type)) : nullptr);
  if (!answer || answer.get() == Py_None || !register_type(type, answer, /*overrule=*/false)) {
    return Entry{};
  }
  return entry_of(type);
}

bool passes(PyTypeObject* type, const Step* at, PyObject* passthrough) {
  if (passthrough == nullptr) {
    return false;
  }
  auto* object = reinterpret_cast<PyObject*>(type);
  if (!PyTuple_Check(passthrough)) {
    THPObjectPtr answer(PyObject_CallFunction(passthrough, "Os", object, path(at).c_str()));
    return answer && PyObject_IsTrue(answer) == 1;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(passthrough); ++i) {
    if (PyTuple_GET_ITEM(passthrough, i) == object) {
      return true;
    }
  }
  return false;
}

bool register_type(PyTypeObject* type, PyObject* answer, bool overrule) {
  Entry entry;
  if (PyUnicode_Check(answer)) {
    entry.kind = kind_named(answer);
    TORCH_CHECK_VALUE(entry.kind != Kind::Unknown, "no kind of container has this name");
  } else if (PyTuple_Check(answer) && PyArg_ParseTuple(answer, "OO", &entry.flatten, &entry.unflatten)) {
    entry.kind = Kind::Custom;
  } else {
    return false;
  }
  Py_INCREF(type);
  Py_XINCREF(entry.flatten);
  Py_XINCREF(entry.unflatten);
  const TypesLock lock;
  const auto [known, added] = registry().emplace(type, entry);
  if (!added && overrule) {
    known->second = entry;
  }
  return true;
}

void set_resolver(PyObject* callable) {
  THPObjectPtr before;
  const TypesLock lock;
  before = std::exchange(resolver, Py_NewRef(callable));
}

Flat flatten(const Entry& entry, PyObject* in) {
  Flat flat;
  THPObjectPtr parts(PyObject_CallOneArg(entry.flatten, in));
  PyObject *keys = nullptr, *children = nullptr, *context = nullptr;
  if (!parts || !PyArg_ParseTuple(parts, "OOO", &keys, &children, &context)) {
    return flat;
  }
  flat.keys = keys == Py_None ? nullptr : PySequence_Tuple(keys);
  flat.context = Py_NewRef(context);
  if (keys == Py_None || flat.keys) {
    flat.children = PySequence_Tuple(children);
  }
  if (flat.children && flat.keys && PyTuple_GET_SIZE(flat.keys.get()) != PyTuple_GET_SIZE(flat.children.get())) {
    PyErr_Format(PyExc_RuntimeError, "flatten of %R gave a different number of keys and children", Py_TYPE(in));
    flat.children = nullptr;
  }
  return flat;
}

THPObjectPtr field_names(PyObject* named_tuple, const Step* at) {
  PyTypeObject* type = Py_TYPE(named_tuple);
  THPObjectPtr names(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "_fields"));
  const Py_ssize_t size = PyTuple_GET_SIZE(named_tuple);
  // Anyone may assign to _fields, and tuple.__new__ takes any number of elements.
  if (names && (!PyTuple_Check(names.get()) || PyTuple_GET_SIZE(names.get()) != size)) {
    PyErr_Format(PyExc_ValueError,
                 "Invalid named tuple for tensors: %R at %s has %zd elements, and its _fields are not their names.",
                 type,
                 path(at).c_str(),
                 size);
    return THPObjectPtr();
  }
  return names;
}

} // namespace weakref_ext
