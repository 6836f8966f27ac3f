#include "inspect.h"

#include "alias.h"
#include "containers.h"

#include <string>

namespace weakref_ext {
namespace {

bool is_plain_tensor(PyObject* in) {
  return is_tensor_type(Py_TYPE(in)) && refusal(THPVariable_Unpack(in)) == nullptr;
}

// visit(child, step) for the children of any container; false with a Python error set, or when `visit` returned false.
template <class Visit> bool each(PyObject* in, const Entry& entry, const Step* at, Visit&& visit) {
  if (PyList_CheckExact(in)) {
    return each_of_list(in, PyList_GET_SIZE(in), at, visit);
  }
  switch (entry.kind) {
  case Kind::Dict:
  case Kind::DefaultDict:
  case Kind::OrderedDict:
    return each_of_dict(in, entry.kind, at, visit);
  case Kind::NamedTuple: {
    THPObjectPtr names = field_names(in, at);
    return names && each_of_tuple(in, names, Step::Written::Attribute, at, visit);
  }
  case Kind::Custom: {
    Flat flat = flatten(entry, in);
    return flat.children && each_of_tuple(flat.children, flat.keys, Step::Written::Text, at, visit);
  }
  default:
    return each_of_tuple(in, nullptr, Step::Written::Index, at, visit);
  }
}

bool is_container(PyObject* in, const Entry& entry) {
  return PyList_CheckExact(in) || PyTuple_CheckExact(in) ||
         (entry.kind != Kind::Unknown && entry.kind != Kind::Passthrough);
}

class Leaves {
 public:
  explicit Leaves(PyObject* passthrough) : passthrough_(passthrough), rows_(PyList_New(0)) {
  }

  bool visit(PyObject* in, const Step* at, int depth) {
    PyTypeObject* type = Py_TYPE(in);
    if (is_plain_tensor(in)) {
      THPObjectPtr row(Py_BuildValue("(sO)", path(at).c_str(), in));
      return row && PyList_Append(rows_, row) == 0;
    }
    if (PyLong_Check(in)) {
      return true;
    }
    const Entry entry = entry_of(type);
    if (is_container(in, entry)) {
      return enter(at, depth) &&
             each(in, entry, at, [&](PyObject* child, const Step& step) { return visit(child, &step, depth + 1); });
    }
    if (PyErr_Occurred() != nullptr) {
      return false;
    }
    if (entry.kind == Kind::Passthrough || passes(type, at, passthrough_)) {
      return true;
    }
    if (PyErr_Occurred() == nullptr) {
      refuse_type(type, at);
    }
    return false;
  }

  PyObject* rows() {
    return rows_.release();
  }

 private:
  PyObject* passthrough_;
  THPObjectPtr rows_;
};

// Appends the description of `in`.
bool write(PyObject* in, const Step* at, int depth, std::string& text) {
  PyTypeObject* type = Py_TYPE(in);
  if (is_tensor_type(type)) {
    text += 'T';
    return true;
  }
  const Entry entry = entry_of(type);
  if (PyErr_Occurred() != nullptr) {
    return false;
  }
  THPObjectPtr name(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__name__"));
  const char* type_name = name ? PyUnicode_AsUTF8(name) : nullptr;
  if (type_name == nullptr) {
    return false;
  }
  if (!is_container(in, entry)) {
    text += type_name;
    return true;
  }
  size_t count = 0;
  std::string runs, last;
  const bool done = enter(at, depth) && each(in, entry, at, [&](PyObject* child, const Step& step) {
                      std::string one;
                      if (!write(child, &step, depth + 1, one)) {
                        return false;
                      }
                      if (count == 0 || one != last) {
                        runs += (count == 0 ? "" : ",") + one;
                        last = std::move(one);
                      }
                      ++count;
                      return true;
                    });
  const bool dict = entry.kind == Kind::Dict || entry.kind == Kind::OrderedDict || entry.kind == Kind::DefaultDict;
  const char* brackets = PyList_CheckExact(in) ? "[]" : dict ? "{}" : "()";
  if (brackets[0] == '(' && !PyTuple_CheckExact(in)) {
    text += type_name;
  }
  text += brackets[0] + std::to_string(count) + ":" + runs + brackets[1];
  return done;
}

} // namespace

PyObject* leaves(PyObject* out, PyObject* passthrough) {
  Leaves found(passthrough);
  return found.visit(out, nullptr, 0) ? found.rows() : nullptr;
}

PyObject* describe(PyObject* out) {
  std::string text;
  return write(out, nullptr, 0, text) ? PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()))
                                      : nullptr;
}

} // namespace weakref_ext
