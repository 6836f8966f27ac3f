// Threads may alias, ask and drop at will: the counts that they share are atomic. Run under ThreadSanitizer in CI.

#include <weakref_ext/weakref_ext.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 8;
constexpr int kRounds = 500;

void in_parallel(const std::function<void(int)>& body) {
  std::latch start(kThreads);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(Threads, AliasAskAndDropASharedTensor) {
  const at::Tensor source = at::ones({16});
  std::atomic<int> wrong = 0;
  in_parallel([&](int /*thread*/) {
    for (int i = 0; i < kRounds; ++i) {
      const auto out = weakref_ext::weak_ref_tensors(c10::ivalue::Tuple::create({source, source.slice(0, i % 16)}));
      const at::Tensor weak = out.toTupleRef().elements()[0].toTensor();
      wrong += static_cast<int>(!weakref_ext::owner_alive(weak) || weak.data_ptr() != source.data_ptr());
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(source.use_count(), 1U);
  EXPECT_EQ(source.storage().use_count(), 1U);
}

TEST(Threads, TheOwnerGoesWhileOthersAskAndAlias) {
  for (int round = 0; round < kRounds / 10; ++round) {
    at::Tensor owner = at::ones({16});
    const at::Tensor weak = weakref_ext::weak_ref_tensors(owner).toTensor();
    in_parallel([&](int thread) {
      if (thread == 0) {
        owner.reset();
        return;
      }
      bool alive = true;
      for (int i = 0; i < 50; ++i) {
        const at::Tensor again = weakref_ext::weak_ref_tensors(weak).toTensor();
        const bool now = weakref_ext::owner_alive(again);
        EXPECT_TRUE(alive || !now) << "a dead owner came back";
        alive = now;
      }
    });
    EXPECT_FALSE(weakref_ext::owner_alive(weak));
  }
}

TEST(Threads, WeakRefsAreDroppedOnOtherThreadsThanTheyWereMadeOn) {
  std::vector<at::Tensor> sources;
  for (int i = 0; i < kThreads; ++i) {
    sources.push_back(at::ones({4}));
  }
  std::vector<std::vector<at::Tensor>> made(kThreads);
  in_parallel([&](int thread) {
    for (int i = 0; i < kRounds; ++i) {
      made[thread].push_back(weakref_ext::weak_ref_tensors(sources[i % kThreads]).toTensor());
    }
  });
  in_parallel([&](int thread) { made[(thread + 1) % kThreads].clear(); });
  for (const at::Tensor& source : sources) {
    EXPECT_EQ(source.storage().getWeakStorageImpl().weak_use_count(), 2U) << "one of them is this observer's";
  }
}

} // namespace
