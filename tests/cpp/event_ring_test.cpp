// The newest events stay, numbered without a gap, whoever writes at the same time.

#include <weakref_ext/event_ring.h>

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace {

using Ring = weakref_ext::EventRing<uint64_t>;

TEST(EventRing, HoldsNothingWhileItIsOff) {
  Ring ring;
  ring.write(1);
  EXPECT_EQ(ring.written(), 0);
  ring.start(4);
  ring.write(1);
  ring.stop();
  ring.write(2);
  EXPECT_EQ(ring.read(0).second, std::vector<uint64_t>{1});
  ring.start(4);
  EXPECT_EQ(ring.written(), 0);
}

TEST(EventRing, KeepsTheNewestAndTellsWhereTheyBegin) {
  Ring ring;
  ring.start(4);
  for (uint64_t i = 0; i < 6; ++i) {
    ring.write(i);
  }
  EXPECT_EQ(ring.written(), 6);
  EXPECT_EQ(ring.read(0), (std::pair<uint64_t, std::vector<uint64_t>>(2, {2, 3, 4, 5})));
  EXPECT_EQ(ring.read(5), (std::pair<uint64_t, std::vector<uint64_t>>(5, {5})));
  EXPECT_EQ(ring.read(6), (std::pair<uint64_t, std::vector<uint64_t>>(6, {})));
}

TEST(EventRing, NumbersHaveNoGapWhileOthersWrite) {
  Ring ring;
  ring.start(10000);
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&ring] {
      for (int i = 0; i < 20000; ++i) {
        ring.write(7);
      }
    });
  }
  uint64_t next = 0, lost = 0, got = 0;
  while (next < 60000) {
    const auto [first, events] = ring.read(next);
    ASSERT_GE(first, next);
    lost += first - next;
    got += events.size();
    next = first + events.size();
    for (const uint64_t event : events) {
      ASSERT_EQ(event, 7);
    }
  }
  for (auto& writer : writers) {
    writer.join();
  }
  EXPECT_EQ(lost + got, 60000);
}

} // namespace
