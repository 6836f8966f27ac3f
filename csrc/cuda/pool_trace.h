#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <functional>

namespace weakref_ext::cuda {

// Whether a storage's memory lies in a segment that the graph pool `id` owns now, by the caching allocator's own books.
// One snapshot of the pool for the whole predicate (legal during a capture, no synchronization). Throws where the
// allocator keeps no such books (cudaMallocAsync).
std::function<bool(const c10::Storage&)> owned_by_pool(c10::MempoolId_t id);

} // namespace weakref_ext::cuda
