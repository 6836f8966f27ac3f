// What a thread keeps of freed objects is bounded, and goes when the thread does.

#include <weakref_ext/recycled.h>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <malloc.h>
#include <memory>
#include <thread>
#include <vector>

namespace {

struct Counted {
  static inline std::atomic<int> alive = 0;
  std::array<std::byte, 1000> body{};

  Counted() {
    ++alive;
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  virtual ~Counted() {
    --alive;
  }
};
using Object = weakref_ext::Recycled<Counted>;

std::vector<std::unique_ptr<Counted>> make(int count) {
  std::vector<std::unique_ptr<Counted>> made;
  made.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    made.push_back(std::make_unique<Object>());
  }
  return made;
}

// KiB in use afterwards, more than before; a sanitizer's malloc tells nothing.
template <class Body> int64_t growth(Body body) {
  body();
  const auto before = static_cast<int64_t>(mallinfo2().uordblks);
  body();
  return (static_cast<int64_t>(mallinfo2().uordblks) - before) / 1024;
}

TEST(Recycled, AThreadKeepsABoundedNumber) {
  const auto before = static_cast<int64_t>(mallinfo2().uordblks);
  make(10'000);
  EXPECT_LT(static_cast<int64_t>(mallinfo2().uordblks) - before, 100 * 1024);
  EXPECT_EQ(Counted::alive, 0);
}

TEST(Recycled, AThreadThatEndsKeepsNothing) {
  EXPECT_LT(growth([] {
              for (int i = 0; i < 100; ++i) {
                std::thread([] { make(64); }).join();
              }
            }),
            1024);
  EXPECT_EQ(Counted::alive, 0);
}

TEST(Recycled, ObjectsMayBeFreedOnAnotherThread) {
  EXPECT_LT(growth([] {
              for (int i = 0; i < 100; ++i) {
                std::thread([made = make(64)]() mutable { made.clear(); }).join();
              }
            }),
            1024);
  EXPECT_EQ(Counted::alive, 0);
}

TEST(Recycled, ObjectsMayOutliveWhatTheirThreadKept) {
  EXPECT_LT(growth([] {
              for (int i = 0; i < 100; ++i) {
                std::thread([] {
                  // Made before the thread keeps anything, so it goes after that.
                  static thread_local std::vector<std::unique_ptr<Counted>> late;
                  late = make(64);
                  make(64);
                }).join();
              }
            }),
            1024);
  EXPECT_EQ(Counted::alive, 0);
}

} // namespace
