#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <functional>
#include <utility>
#include <vector>

namespace weakref_ext::cuda {

// Whether a storage's memory lies in a segment that the graph pool `id` owns now, by the caching allocator's own books.
// One snapshot of the pool for the whole predicate (legal during a capture, no synchronization). Throws where the
// allocator keeps no such books (cudaMallocAsync).
std::function<bool(const c10::Storage&)> owned_by_pool(c10::MempoolId_t id);

// Bytes that the caching allocator holds on a device, for all pools.
int64_t reserved_bytes(c10::DeviceIndex device);

// What the caching allocator did with the memory of a graph pool. Python reads the bytes: sanitizer/_trace.py.
struct PoolEvent {
  uint64_t address;
  uint64_t bytes; // as requested, before rounding
  uint64_t stream;
  uint64_t pool[2];
  int16_t device;
  uint16_t action; // c10::CachingDeviceAllocator::TraceEntry::Action
  uint32_t unused;
};
static_assert(sizeof(PoolEvent) == 48);

// Logs hand-outs, and segments that are taken from and given back to CUDA, of every pool but the default one, for all
// devices; the newest `capacity` of them are kept. The first call attaches a callback to the allocator, for good: torch
// cannot detach it. CUDA must be initialized. Throws under an allocator that takes no callbacks (cudaMallocAsync).
void start_trace(size_t capacity);
void stop_trace();
uint64_t trace_position();
std::pair<uint64_t, std::vector<PoolEvent>> read_trace(uint64_t first);

} // namespace weakref_ext::cuda
