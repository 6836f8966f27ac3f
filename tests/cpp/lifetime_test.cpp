// A weak ref owns nothing, knows whether its owner lives, and no path leaves a reference behind.

#include <weakref_ext/weakref_ext.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

namespace {

using c10::IValue;
using weakref_ext::is_weak_ref;
using weakref_ext::owner_alive;

// A tensor over memory of its own that reports when it is given back.
struct Owned {
  explicit Owned(int64_t elements = 4)
      : tensor(at::from_blob(memory->data(), {elements}, [freed = freed, memory = memory](void*) { *freed = true; })) {
  }
  std::shared_ptr<bool> freed = std::make_shared<bool>(false);
  std::shared_ptr<std::array<float, 64>> memory = std::make_shared<std::array<float, 64>>();
  at::Tensor tensor;
};

at::Tensor weak(const at::Tensor& source) {
  return weakref_ext::weak_ref_tensors(source).toTensor();
}

TEST(Lifetime, AWeakRefDoesNotKeepTheMemory) {
  Owned owned;
  const at::Tensor ref = weak(owned.tensor);
  EXPECT_TRUE(owner_alive(ref));
  owned.tensor.reset();
  EXPECT_TRUE(*owned.freed);
  EXPECT_FALSE(owner_alive(ref));
  EXPECT_EQ(ref.data_ptr(), owned.memory->data());
}

TEST(Lifetime, NorDoesAnEmptyViewOfABigStorage) {
  Owned owned;
  const at::Tensor ref = weak(owned.tensor.slice(0, 0, 0));
  EXPECT_EQ(ref.numel(), 0);
  owned.tensor.reset();
  EXPECT_TRUE(*owned.freed);
}

TEST(Lifetime, NorDoesAViewOrDetachOfAWeakRef) {
  Owned owned;
  const at::Tensor view = weak(owned.tensor).view({2, 2}).detach().t();
  EXPECT_TRUE(is_weak_ref(view));
  EXPECT_TRUE(owner_alive(view));
  owned.tensor.reset();
  EXPECT_TRUE(*owned.freed);
  EXPECT_FALSE(owner_alive(view));
}

TEST(Lifetime, TheOwnerLivesForAsLongAsAnyOfItsViews) {
  Owned owned;
  const at::Tensor ref = weak(owned.tensor);
  at::Tensor view = owned.tensor.slice(0, 1);
  owned.tensor.reset();
  EXPECT_TRUE(owner_alive(ref));
  view.reset();
  EXPECT_FALSE(owner_alive(ref));
}

TEST(Lifetime, AWeakRefOfAWeakRefPointsAtTheRootOwner) {
  Owned owned;
  at::Tensor first = weak(owned.tensor);
  const at::Tensor second = weak(first);
  first.reset();
  EXPECT_TRUE(owner_alive(second));
  owned.tensor.reset();
  EXPECT_FALSE(owner_alive(second));
  EXPECT_FALSE(owner_alive(weak(second)));
}

TEST(Lifetime, AnOwnerThatWasResizedAwayIsNotAlive) {
  const at::Tensor source = at::ones({1024});
  const at::Tensor ref = weak(source);
  source.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, at::kCPU));
  EXPECT_FALSE(owner_alive(ref));
}

TEST(Lifetime, ATensorThatIsNoWeakRefIsItsOwnOwner) {
  EXPECT_TRUE(owner_alive(at::ones({2})));
  EXPECT_TRUE(owner_alive(at::Tensor()));
  EXPECT_FALSE(is_weak_ref(at::Tensor()));
  EXPECT_FALSE(is_weak_ref(at::ones({2})));
  EXPECT_FALSE(is_weak_ref(at::ones({2, 2}).to_sparse()));
}

TEST(Lifetime, AWeakRefThatIsWrittenToKeepsNothingElseAlive) {
  Owned owned;
  const at::Tensor ref = weak(owned.tensor);
  const at::Tensor leaf = at::ones({4}).requires_grad_();
  ref.copy_(leaf.detach() * 2);
  EXPECT_TRUE(at::equal(owned.tensor, at::full({4}, 2.)));
}

TEST(Lifetime, TheCountsOfTheSourceAreAsBefore) {
  Owned owned;
  const auto storage_count = owned.tensor.storage().use_count();
  const auto tensor_count = owned.tensor.use_count();
  c10::weak_intrusive_ptr<c10::StorageImpl> observer(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(owned.tensor.storage().unsafeGetStorageImpl()));
  const auto weak_count = observer.weak_use_count();
  for (int i = 0; i < 100; ++i) {
    const IValue out = weakref_ext::weak_ref_tensors(c10::List<at::Tensor>({owned.tensor, owned.tensor}));
    EXPECT_EQ(owned.tensor.storage().use_count(), storage_count);
    EXPECT_EQ(owned.tensor.use_count(), tensor_count);
    EXPECT_EQ(observer.weak_use_count(), weak_count + 1) << "two refs of one tensor share one weak storage";
  }
  EXPECT_EQ(observer.weak_use_count(), weak_count);
}

TEST(Lifetime, ARefusalAtAnyPositionLeavesEveryCountAsBefore) {
  constexpr size_t kElements = 24; // beyond the scanned part of the memo
  std::vector<at::Tensor> sources;
  for (size_t i = 0; i < kElements; ++i) {
    sources.push_back(at::ones({1}));
  }
  for (size_t bad = 0; bad < kElements; ++bad) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (size_t i = 0; i < kElements; ++i) {
      list.push_back(i == bad ? IValue() : IValue(sources[i]));
    }
    EXPECT_THROW(weakref_ext::weak_ref_tensors(c10::ivalue::Tuple::create({list})), c10::ValueError);
  }
  for (const at::Tensor& source : sources) {
    EXPECT_EQ(source.use_count(), 1U);
    EXPECT_EQ(source.storage().use_count(), 1U);
    EXPECT_EQ(source.storage().getWeakStorageImpl().weak_use_count(), 2U) << "one of them is this observer's";
  }
}

} // namespace
