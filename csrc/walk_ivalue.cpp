#include "walk_ivalue.h"

#include "alias.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>

#include <string>
#include <utility>
#include <vector>

namespace weakref_ext {
namespace {

constexpr int kMaxDepth = 1000;

struct Step {
  const Step* parent;
  std::string key;
};

// Concatenated, not streamed, here and in every message: a compiler that links libstdc++'s streams into the library
// statically gives them a locale of their own, which crashes.
std::string path(const Step* step) {
  return step == nullptr ? "out" : path(step->parent) + "[" + step->key + "]";
}

std::string written(const c10::IValue& key) {
  return key.isString() ? "'" + key.toStringRef() + "'" : key.isInt() ? std::to_string(key.toInt()) : key.tagKind();
}

class Walk {
 public:
  c10::IValue visit(const c10::IValue& in, const Step* at, int depth) {
    if (in.isTensor()) {
      const at::Tensor& source = in.toTensor();
      const char* reason = refusal(source);
      TORCH_CHECK_VALUE(reason == nullptr, "Invalid type for tensors: Tensor at " + path(at) + ": " + reason + ".");
      return tensor(source);
    }
    if (in.isInt() || in.isBool()) {
      return in;
    }
    TORCH_CHECK(depth < kMaxDepth, path(at) + " is nested more than " + std::to_string(kMaxDepth) + " levels deep");
    if (in.isTuple()) {
      return tuple(in, at, depth);
    }
    if (in.isList()) {
      return list(in, at, depth);
    }
    if (in.isGenericDict()) {
      return dict(in, at, depth);
    }
    TORCH_CHECK_VALUE(
        false,
        "Invalid type for tensors: " + in.tagKind() + " at " + path(at) +
            ". Supported are Tensor, List, Tuple, Dict, int and bool; take this value out of the structure.");
  }

 private:
  c10::IValue tuple(const c10::IValue& in, const Step* at, int depth) {
    const auto& source = in.toTupleRef();
    std::vector<c10::IValue> elements;
    elements.reserve(source.size());
    for (const c10::IValue& element : source.elements()) {
      const Step step{at, std::to_string(elements.size())};
      elements.push_back(visit(element, &step, depth + 1));
    }
    return c10::ivalue::Tuple::createNamed(std::move(elements), source.type<c10::TupleType>());
  }

  c10::IValue list(const c10::IValue& in, const Step* at, int depth) {
    const auto source = in.toList();
    c10::impl::GenericList out(source.elementType());
    out.reserve(source.size());
    for (size_t i = 0; i < source.size(); ++i) {
      const Step step{at, std::to_string(i)};
      out.push_back(visit(source.get(i), &step, depth + 1));
    }
    return out;
  }

  c10::IValue dict(const c10::IValue& in, const Step* at, int depth) {
    const auto source = in.toGenericDict();
    c10::impl::GenericDict out(source.keyType(), source.valueType());
    out.reserve(source.size());
    for (const auto& item : source) {
      TORCH_CHECK_VALUE(!item.key().isTensor(),
                        "Invalid type for tensors: Tensor as a dict key at " + path(at) +
                            ": its memory would stay allocated; key the dict by int or str.");
      const Step step{at, written(item.key())};
      out.insert(item.key(), visit(item.value(), &step, depth + 1));
    }
    return out;
  }

  // One tensor gives one alias; one that nobody else holds is met only here.
  at::Tensor tensor(const at::Tensor& source) {
    if (source.use_count() == 1) {
      return aliases_.of(source);
    }
    if (const at::Tensor* made = tensors_.find(source.unsafeGetTensorImpl())) {
      return *made;
    }
    at::Tensor alias = aliases_.of(source);
    tensors_.add(source.unsafeGetTensorImpl(), source, alias);
    return alias;
  }

  Aliases aliases_;
  Memo<at::Tensor> tensors_;
};

} // namespace

c10::IValue weak_ref_tensors(const c10::IValue& out) {
  if (disabled()) {
    return out;
  }
  return Walk().visit(out, nullptr, 0);
}

} // namespace weakref_ext
