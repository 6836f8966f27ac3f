// Weak refs from C++: through the C++ API, through the dispatcher, and, where there is a GPU, for what they are for:
// two graph captures whose outputs share the blocks of one memory pool.

#include <weakref_ext/weakref_ext.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdlib>
#include <iostream>
#include <optional>

#ifdef EXAMPLE_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace {

void check(bool condition, const char* what) {
  std::cout << (condition ? "ok   " : "FAIL ") << what << '\n';
  if (!condition) {
    std::exit(1);
  }
}

c10::IValue output() {
  const at::Tensor hidden = at::ones({2, 4});
  return c10::ivalue::Tuple::create({hidden, c10::List<at::Tensor>({hidden + 1, hidden + 2})});
}

void through_the_cpp_api() {
  c10::IValue out = output();
  const c10::IValue weak = weakref_ext::weak_ref_tensors(out);
  const at::Tensor aux = weak.toTupleRef().elements()[1].toTensorVector().at(0);
  check(weakref_ext::is_weak_ref(aux) && weakref_ext::owner_alive(aux), "C++ API: a nested tensor is a weak ref");
  out = c10::IValue();
  check(!weakref_ext::owner_alive(aux), "C++ API: the weak ref kept nothing alive");
}

void through_the_dispatcher() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("weakref_ext::weak_ref_tensors", "ivalue");
  const c10::IValue out = output();
  torch::jit::Stack stack{out};
  op.callBoxed(&stack);
  check(weakref_ext::is_weak_ref(stack.back().toTupleRef().elements()[0].toTensor()), "dispatcher: the same walk");
}

#ifdef EXAMPLE_CUDA
struct Capture {
  at::Tensor in;
  at::cuda::CUDAGraph graph;
  c10::IValue out; // weak refs: valid after a replay, until the pool's block is written by another capture
};

void capture(Capture& capture, int64_t tokens, at::cuda::MempoolId_t pool) {
  capture.in = at::ones({tokens, 1 << 10}, at::kCUDA);
  capture.graph.capture_begin(pool);
  {
    const c10::IValue out = c10::ivalue::Tuple::create({capture.in * 2, c10::List<at::Tensor>({capture.in + 1})});
    capture.out = weakref_ext::weak_ref_tensors(out);
  } // the strong output goes here, so that the next capture is given its blocks
  capture.graph.capture_end();
}

void two_captures_share_one_pool() {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  Capture big;
  Capture small;
  const auto pool = at::cuda::graph_pool_handle();
  capture(big, 4096, pool);
  capture(small, 2048, pool);
  const auto first = [](const Capture& capture) { return capture.out.toTupleRef().elements()[0].toTensor(); };
  const auto nested = [](const Capture& capture) {
    return capture.out.toTupleRef().elements()[1].toTensorVector().at(0);
  };
  const void* block = first(small).data_ptr();
  check(block == first(big).data_ptr() || block == nested(big).data_ptr(),
        "CUDA graph: the second capture reuses a block of the first one's output");
  big.graph.replay();
  check(at::all(first(big) == 2).item<bool>(), "CUDA graph: replay, then read through the weak ref");
  small.graph.replay();
  check(at::all(nested(small) == 2).item<bool>(), "CUDA graph: the nested one too");
}
#endif

} // namespace

int main() {
  through_the_cpp_api();
  through_the_dispatcher();
#ifdef EXAMPLE_CUDA
  if (c10::cuda::device_count() > 0) {
    two_captures_share_one_pool();
    return 0;
  }
#endif
  std::cout << "no CUDA: the graph part is left out\n";
}
