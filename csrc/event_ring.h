#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace weakref_ext {

// The newest `capacity` events of a bounded log, numbered from 0 since start(). Writers may hold any lock: nothing is
// called and no other lock is taken under this one. While it is off, a write is one relaxed load.
template <class Event> class EventRing {
 public:
  // Forgets what was logged before.
  void start(size_t capacity) {
    // Not value-initialized: pages that no event reaches cost nothing.
    std::unique_ptr<Event[]> slots(new Event[capacity]);
    const std::lock_guard<std::mutex> lock(mutex_);
    slots_ = std::move(slots);
    capacity_ = capacity;
    written_ = 0;
    on_.store(true, std::memory_order_relaxed);
  }

  // What was logged stays readable.
  void stop() {
    on_.store(false, std::memory_order_relaxed);
  }

  bool on() const {
    return on_.load(std::memory_order_relaxed);
  }

  void write(const Event& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on() && capacity_ != 0) {
      slots_[written_++ % capacity_] = event;
    }
  }

  // How many events were written: the number that the next one gets.
  uint64_t written() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return written_;
  }

  // The events from number `first` on that are still held, and the number of the first of them: larger than asked for
  // when older ones are lost. Copies in steps, so that a writer never waits for long.
  std::pair<uint64_t, std::vector<Event>> read(uint64_t first) {
    constexpr uint64_t kStep = 4096;
    std::vector<Event> events;
    for (uint64_t next = first;;) {
      events.reserve(events.size() + kStep); // not under the lock
      const std::lock_guard<std::mutex> lock(mutex_);
      const uint64_t oldest = written_ > capacity_ ? written_ - capacity_ : 0;
      if (next < oldest) { // lost, before or while reading
        events.clear();
        first = next = oldest;
      }
      const uint64_t end = std::min(written_, next + kStep);
      for (; next < end; ++next) {
        events.push_back(slots_[next % capacity_]);
      }
      if (next >= written_) {
        return {first, std::move(events)};
      }
    }
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> on_{false};
  std::unique_ptr<Event[]> slots_;
  size_t capacity_ = 0;
  uint64_t written_ = 0;
};

} // namespace weakref_ext
