// Coverage of the native module for atheris, whose libFuzzer reads clang's counters: gcc's -fsanitize-coverage=trace-pc
// calls this at every edge. fuzz_walk.py hands the two tables to libFuzzer, which wants a code address per counter.

#include <cstddef>
#include <cstdint>

namespace {
constexpr std::size_t kCounters = 1 << 14;
}

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED std::uint8_t weakref_ext_counters[kCounters];
EXPORTED std::uintptr_t weakref_ext_pcs[2 * kCounters]; // pairs of address and flags
EXPORTED extern const std::size_t weakref_ext_counter_count = kCounters;

void __sanitizer_cov_trace_pc() {
  // Relative to this module, so that a counter means the same edge in every run.
  const auto edge = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) -
                    reinterpret_cast<std::uintptr_t>(weakref_ext_counters);
  ++weakref_ext_counters[edge % kCounters];
}

} // extern "C"
