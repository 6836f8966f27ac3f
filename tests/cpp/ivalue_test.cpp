// Every kind of IValue is walked right or refused with its path.

#include <weakref_ext/weakref_ext.h>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Stream.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace {

using c10::IValue;
using weakref_ext::is_weak_ref;
using weakref_ext::weak_ref_tensors;

IValue tuple(std::vector<IValue> elements) {
  return c10::ivalue::Tuple::create(std::move(elements));
}

IValue any_list(std::vector<IValue> elements) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (IValue& element : elements) {
    list.push_back(std::move(element));
  }
  return list;
}

void expect_weak(const IValue& value, const at::Tensor& source) {
  ASSERT_TRUE(value.isTensor());
  EXPECT_TRUE(is_weak_ref(value.toTensor()));
  EXPECT_EQ(value.toTensor().data_ptr(), source.data_ptr());
}

template <class Error> void expect_refused(const IValue& in, const std::string& part) {
  try {
    weak_ref_tensors(in);
    FAIL() << "not refused: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
        << error.what_without_backtrace() << "\n  lacks: " << part;
  }
}

TEST(IValues, TensorIntAndBoolAtTheTop) {
  const at::Tensor t = at::ones({2});
  expect_weak(weak_ref_tensors(t), t);
  EXPECT_EQ(weak_ref_tensors(int64_t{7}).toInt(), 7);
  EXPECT_TRUE(weak_ref_tensors(true).toBool());
}

TEST(IValues, TypedAndGenericListsKeepTheirElementType) {
  const at::Tensor t = at::ones({2});
  const IValue tensors = weak_ref_tensors(c10::List<at::Tensor>({t, t + 1}));
  ASSERT_TRUE(tensors.isTensorList());
  expect_weak(tensors.toTensorVector().at(0), t);

  EXPECT_EQ(weak_ref_tensors(c10::List<int64_t>({1, 2})).toIntVector(), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(weak_ref_tensors(c10::List<bool>({true})).isBoolList());

  const IValue optional = weak_ref_tensors(c10::List<std::optional<at::Tensor>>({std::optional<at::Tensor>(t)}));
  EXPECT_EQ(*optional.toList().elementType(), *c10::OptionalType::ofTensor());

  const IValue empty = weak_ref_tensors(any_list({}));
  EXPECT_EQ(empty.toListRef().size(), 0U);

  c10::List<c10::List<at::Tensor>> nested;
  nested.push_back(c10::List<at::Tensor>({t}));
  expect_weak(weak_ref_tensors(nested).toListRef()[0].toTensorVector().at(0), t);
}

TEST(IValues, TheOutputIsANewStructureAndTheInputUntouched) {
  const at::Tensor t = at::ones({2});
  const IValue in = tuple({t, any_list({t, int64_t{1}})});
  const IValue out = weak_ref_tensors(in);
  EXPECT_FALSE(is_weak_ref(in.toTupleRef().elements()[0].toTensor()));
  EXPECT_FALSE(is_weak_ref(in.toTupleRef().elements()[1].toListRef()[0].toTensor()));
  EXPECT_FALSE(out.toTupleRef().elements()[1].toList().is(in.toTupleRef().elements()[1].toList()));
}

TEST(IValues, NamedTuplesKeepTheirNames) {
  const at::Tensor t = at::ones({2});
  const auto type = c10::TupleType::createNamed("Output",
                                                std::vector<std::string>{"hidden", "count"},
                                                std::vector<c10::TypePtr>{c10::TensorType::get(), c10::IntType::get()});
  const IValue out = weak_ref_tensors(c10::ivalue::Tuple::createNamed({t, int64_t{3}}, type));
  expect_weak(out.toTupleRef().elements()[0], t);
  EXPECT_EQ(out.toTupleRef().type()->repr_str(), type->repr_str());
  EXPECT_EQ(weak_ref_tensors(tuple({})).toTupleRef().size(), 0U);
}

TEST(IValues, DictsKeepKeysTypesAndOrder) {
  const at::Tensor t = at::ones({2});
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("b", t);
  dict.insert("a", t + 1);
  const IValue out = weak_ref_tensors(dict);
  const auto made = out.toGenericDict();
  EXPECT_EQ(*made.keyType(), *c10::StringType::get());
  EXPECT_EQ(*made.valueType(), *c10::TensorType::get());
  EXPECT_EQ(made.begin()->key().toStringRef(), "b");
  expect_weak(made.at("b"), t);
  EXPECT_FALSE(is_weak_ref(dict.at("b")));
}

TEST(IValues, ATensorKeyIsRefusedSinceItWouldStayStrong) {
  c10::Dict<at::Tensor, int64_t> dict;
  dict.insert(at::ones({2}), 1);
  expect_refused<c10::ValueError>(tuple({int64_t{0}, dict}), "Tensor as a dict key at out[1]");
}

TEST(IValues, EveryOtherKindIsRefusedWithItsPath) {
  const at::Tensor t = at::ones({2});
  const auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  const struct {
    const char* kind;
    IValue value;
  } refused[] = {
      {"None", IValue()},
      {"Double", 1.5},
      {"ComplexDouble", c10::complex<double>(1, 2)},
      {"String", "name"},
      {"Device", c10::Device(at::kCPU)},
      {"Storage", t.storage()},
      {"Stream", c10::Stream(c10::Stream::DEFAULT, at::kCPU)},
      {"Future", future},
      {"Generator", at::globalContext().defaultGenerator(at::kCPU)},
  };
  for (const auto& [kind, value] : refused) {
    expect_refused<c10::ValueError>(tuple({t, any_list({t, value})}), std::string(kind) + " at out[1][1]");
  }
  expect_refused<c10::ValueError>(c10::List<double>({1.5}), "Double at out[0]");
  expect_refused<c10::ValueError>(at::Tensor(), "Tensor at out: an undefined tensor");
  expect_refused<c10::ValueError>(any_list({at::ones({2, 2}).to_sparse()}), "Tensor at out[0]: a tensor that is more");
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("aux", any_list({IValue()}));
  expect_refused<c10::ValueError>(dict, "None at out['aux'][0]");
}

TEST(IValues, SharingIsKept) {
  const at::Tensor t = at::arange(6, at::kFloat);
  const IValue out = weak_ref_tensors(tuple({t, any_list({t, t.slice(0, 2)}), at::ones({1})}));
  const auto& elements = out.toTupleRef().elements();
  const auto inner = elements[1].toListRef();
  EXPECT_TRUE(elements[0].toTensor().is_same(inner[0].toTensor()));
  EXPECT_TRUE(elements[0].toTensor().is_alias_of(inner[1].toTensor()));
  EXPECT_EQ(inner[1].toTensor().storage_offset(), 2);
  EXPECT_FALSE(elements[0].toTensor().is_alias_of(elements[2].toTensor()));
  EXPECT_FALSE(elements[0].toTensor().is_alias_of(t));
}

TEST(IValues, SharingIsKeptAmongManyTensors) {
  std::vector<IValue> in;
  for (int i = 0; i < 100; ++i) { // more than the walk finds by scanning
    in.emplace_back(at::full({1}, i));
  }
  const std::vector<IValue> half = in;
  in.insert(in.end(), half.begin(), half.end());
  const IValue out = weak_ref_tensors(any_list(in));
  for (size_t i = 0; i < half.size(); ++i) {
    const auto list = out.toListRef();
    EXPECT_TRUE(list[i].toTensor().is_same(list[i + half.size()].toTensor()));
    EXPECT_EQ(list[i].toTensor().item<int64_t>(), static_cast<int64_t>(i));
  }
}

TEST(IValues, AListThatContainsItselfIsAnErrorAndNoCrash) {
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(list);
  expect_refused<c10::Error>(list, "nested more than 1000 levels deep");
  list.clear();
}

TEST(IValues, TheOperatorWalksToo) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("weakref_ext::weak_ref_tensors", "ivalue");
  const at::Tensor t = at::ones({2}).requires_grad_();
  torch::jit::Stack stack{tuple({t, c10::List<at::Tensor>({t})})};
  op.callBoxed(&stack);
  ASSERT_EQ(stack.size(), 1U);
  expect_weak(stack[0].toTupleRef().elements()[0], t);
  EXPECT_FALSE(stack[0].toTupleRef().elements()[0].toTensor().requires_grad());
  expect_weak(stack[0].toTupleRef().elements()[1].toTensorVector().at(0), t);
}

} // namespace
