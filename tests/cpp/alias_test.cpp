// An alias is its source in every property but ownership.

#include <weakref_ext/weakref_ext.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace {

using weakref_ext::Aliases;

at::Tensor weak(const at::Tensor& source) {
  EXPECT_EQ(weakref_ext::refusal(source), nullptr);
  return Aliases().of(source);
}

void expect_same_but_ownership(const at::Tensor& weak, const at::Tensor& source) {
  EXPECT_EQ(weak.unsafeGetTensorImpl()->data(), source.unsafeGetTensorImpl()->data());
  EXPECT_EQ(weak.storage().data_ptr().get(), source.storage().data_ptr().get());
  EXPECT_EQ(weak.storage().nbytes(), source.storage().nbytes());
  EXPECT_EQ(weak.sizes(), source.sizes());
  EXPECT_EQ(weak.strides(), source.strides());
  EXPECT_EQ(weak.storage_offset(), source.storage_offset());
  EXPECT_EQ(weak.dtype(), source.dtype());
  EXPECT_EQ(weak.device(), source.device());
  EXPECT_EQ(weak.layout(), source.layout());
  EXPECT_EQ(weak.is_conj(), source.is_conj());
  EXPECT_EQ(weak.is_neg(), source.is_neg());
  EXPECT_EQ(weak.is_contiguous(), source.is_contiguous());
  EXPECT_EQ(weak.suggest_memory_format(), source.suggest_memory_format());
  EXPECT_FALSE(weak.requires_grad());
  EXPECT_EQ(weak.grad_fn(), nullptr);
  EXPECT_NE(weak.storage().unsafeGetStorageImpl(), source.storage().unsafeGetStorageImpl());
  EXPECT_TRUE(weakref_ext::is_weak_ref(weak));
  EXPECT_FALSE(weakref_ext::is_weak_ref(source));
}

TEST(Alias, HasEveryStridedGeometry) {
  const at::Tensor base = at::arange(2 * 3 * 4 * 5, at::kFloat).view({2, 3, 4, 5});
  const at::Tensor sources[] = {
      base,
      base.transpose(1, 3),
      base.select(0, 1).slice(1, 1, 4, 2),
      base.as_strided({2, 2}, {7, 3}, 11),
      base.contiguous(at::MemoryFormat::ChannelsLast),
      at::ones({1}).expand({4, 6}),
      at::scalar_tensor(3),
      at::empty({0, 7}),
      at::empty({2, 0, 3}).transpose(0, 2),
  };
  for (const at::Tensor& source : sources) {
    const at::Tensor ref = weak(source);
    expect_same_but_ownership(ref, source);
    EXPECT_TRUE(at::equal(ref, source));
  }
}

TEST(Alias, HasEveryDtype) {
  for (int type = 0; type < static_cast<int>(at::ScalarType::NumOptions); ++type) {
    const auto dtype = static_cast<at::ScalarType>(type);
    if (dtype == at::ScalarType::Undefined || at::isQIntType(dtype)) {
      continue;
    }
    SCOPED_TRACE(at::toString(dtype));
    const at::Tensor source = at::empty({3, 2}, dtype);
    const at::Tensor ref = weak(source);
    expect_same_but_ownership(ref, source);
    EXPECT_EQ(ref.element_size(), source.element_size());
  }
}

TEST(Alias, HasTheConjugateAndNegativeBits) {
  const at::Tensor base = at::view_as_complex(at::arange(8, at::kFloat).view({4, 2}));
  for (const at::Tensor& source : {base.conj(), at::imag(base.conj()), base._neg_view()}) {
    ASSERT_TRUE(source.is_conj() || source.is_neg());
    const at::Tensor ref = weak(source);
    expect_same_but_ownership(ref, source);
    EXPECT_TRUE(at::equal(ref.resolve_conj().resolve_neg(), source.resolve_conj().resolve_neg()));
  }
}

TEST(Alias, WritesAreVisibleOnBothSides) {
  const at::Tensor source = at::zeros({2, 3});
  const at::Tensor ref = weak(source.t());
  ref.select(0, 2).fill_(5);
  EXPECT_TRUE(at::equal(source.select(1, 2), at::full({2}, 5.)));
  source.fill_(7);
  EXPECT_TRUE(at::equal(ref, at::full({3, 2}, 7.)));
}

TEST(Alias, WorksOnAMetaTensor) {
  const at::Tensor source = at::empty_strided({2, 3}, {1, 2}, at::device(at::kMeta).dtype(at::kHalf));
  expect_same_but_ownership(weak(source), source);
}

TEST(Alias, IsNotResizable) {
  const at::Tensor ref = weak(at::ones({4}));
  EXPECT_FALSE(ref.storage().resizable());
  EXPECT_ANY_THROW(ref.resize_({1 << 20}));
}

TEST(Alias, OfATensorThatRequiresGradDoesNot) {
  const at::Tensor leaf = at::ones({3}).requires_grad_();
  for (const bool grad_mode : {true, false}) {
    const c10::AutoGradMode mode(grad_mode);
    for (const at::Tensor& source : {leaf, leaf.view({3, 1})}) {
      const at::Tensor ref = weak(source);
      EXPECT_FALSE(ref.requires_grad());
      EXPECT_EQ(ref.grad_fn(), nullptr);
      EXPECT_EQ(ref.data_ptr(), source.data_ptr());
      EXPECT_TRUE(ref.is_leaf());
    }
  }
}

TEST(Alias, IsAnInferenceTensorExactlyInInferenceMode) {
  const at::Tensor normal = at::ones({3});
  EXPECT_FALSE(weak(normal).is_inference());
  const c10::InferenceMode guard;
  const at::Tensor inference = at::ones({3});
  EXPECT_TRUE(weak(normal).is_inference());
  EXPECT_TRUE(weak(inference).is_inference());
  const c10::InferenceMode off(false);
  EXPECT_FALSE(weak(inference).is_inference());
}

TEST(Alias, MaterializesACopyOnWriteStorage) {
  const at::Tensor source = at::ones({4});
  const at::Tensor lazy = at::_lazy_clone(source);
  const at::Tensor ref = weak(lazy);
  ref.fill_(2);
  EXPECT_TRUE(at::equal(source, at::ones({4})));
  EXPECT_TRUE(at::equal(lazy, at::full({4}, 2.)));
}

TEST(Refusal, NamesWhatIsMoreThanSizesAndStrides) {
  const struct {
    at::Tensor tensor;
    const char* reason;
  } refused[] = {
      {at::Tensor(), "undefined"},
      {at::ones({2, 2}).to_sparse(), "sparse"},
      {at::ones({2, 2}).to_sparse_csr(), "sparse"},
      {at::quantize_per_tensor(at::ones({2}), 0.5, 0, at::kQInt8), "quantized"},
      {at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({3})}), "nested"},
  };
  for (const auto& [tensor, reason] : refused) {
    const char* refusal = weakref_ext::refusal(tensor);
    ASSERT_NE(refusal, nullptr) << reason;
    EXPECT_NE(std::string(refusal).find(reason), std::string::npos) << refusal;
  }
  EXPECT_EQ(weakref_ext::refusal(at::_efficientzerotensor({2}, at::kFloat)) == nullptr,
            at::_efficientzerotensor({2}, at::kFloat).has_storage());
}

} // namespace
