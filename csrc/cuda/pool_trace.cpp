#include "pool_trace.h"

#include "../event_ring.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace weakref_ext::cuda {
namespace {

struct Segment {
  c10::DeviceIndex device;
  uintptr_t begin;
  uintptr_t end;

  bool operator<(const Segment& other) const {
    return begin < other.begin;
  }
};

// Never destroyed: the allocator outlives it, and calls back until the process ends.
EventRing<PoolEvent>& ring() {
  static auto* const events = new EventRing<PoolEvent>();
  return *events;
}

// Runs under the allocator's lock, perhaps with the GIL held and perhaps without: no Python, no allocation.
void on_trace_entry(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  if (C10_LIKELY(!ring().on())) {
    return;
  }
  switch (entry.action_) {
  case Entry::ALLOC:
  case Entry::SEGMENT_ALLOC:
  case Entry::SEGMENT_MAP:
  case Entry::SEGMENT_FREE:
  case Entry::SEGMENT_UNMAP:
    break;
  default:
    return;
  }
  if (entry.mempool_ == c10::MempoolId_t{0, 0}) {
    return;
  }
  ring().write({entry.addr_,
                entry.size_,
                reinterpret_cast<uint64_t>(entry.stream_),
                {entry.mempool_.first, entry.mempool_.second},
                entry.device_,
                static_cast<uint16_t>(entry.action_),
                0});
}

} // namespace

void start_trace(size_t capacity) {
  static const bool attached = [] {
    c10::cuda::CUDACachingAllocator::get()->attachAllocatorTraceTracker(&on_trace_entry);
    return true;
  }();
  static_cast<void>(attached);
  ring().start(capacity);
}

void stop_trace() {
  ring().stop();
}

uint64_t trace_position() {
  return ring().written();
}

std::pair<uint64_t, std::vector<PoolEvent>> read_trace(uint64_t first) {
  return ring().read(first);
}

int64_t reserved_bytes(c10::DeviceIndex device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device);
  return stats.reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

std::function<bool(const c10::Storage&)> owned_by_pool(c10::MempoolId_t id) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  TORCH_CHECK_NOT_IMPLEMENTED(
      allocator::name() == "native",
      "weak_ref_tensors(pool=...) asks the native caching allocator which memory a pool owns; the " +
          allocator::name() +
          " backend does not keep that. Leave pool out, or take the backend out of PYTORCH_CUDA_ALLOC_CONF.");
  std::vector<Segment> segments;
  // A segment of an expandable pool is one mapped range here, like any other.
  for (const auto& info : allocator::snapshot(id, /*include_traces=*/false).segments) {
    if (info.owner_private_pool_id == id) {
      segments.push_back({info.device, info.address, info.address + info.total_size});
    }
  }
  std::sort(segments.begin(), segments.end());
  return [segments = std::move(segments)](const c10::Storage& storage) {
    if (!storage.device().is_cuda()) {
      return false;
    }
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    auto after = std::upper_bound(segments.begin(), segments.end(), Segment{0, address, 0});
    // Addresses are unique over the devices of one process.
    return after != segments.begin() && address < (--after)->end && after->device == storage.device().index();
  };
}

} // namespace weakref_ext::cuda
