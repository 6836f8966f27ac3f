// What the benchmarks compare with: a per-tensor op as the engines register it, the least that a walk must do, and a
// C++ caller of our own op.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/types.h>

#include <chrono>

namespace {

// One tensor through the dispatcher, for the backend key, with its geometry copied into vectors: vLLM's and SGLang's
// op.
at::Tensor per_tensor(const at::Tensor& input) {
  const std::vector<int64_t> sizes = input.sizes().vec();
  const std::vector<int64_t> strides = input.strides().vec();
  return torch::from_blob(input.data_ptr(), sizes, strides, input.options());
}

TORCH_LIBRARY(weakref_bench, m) {
  m.def("per_tensor(Tensor input) -> Tensor");
}
TORCH_LIBRARY_IMPL(weakref_bench, CPU, m) {
  m.impl("per_tensor", &per_tensor);
}
TORCH_LIBRARY_IMPL(weakref_bench, CUDA, m) {
  m.impl("per_tensor", &per_tensor);
}

void keep(void*) {
}

// The floor: for every tensor of a flat list one StorageImpl, one TensorImpl and one Python object, in a new list.
// No check, no sharing, no provenance, no structure.
py::list floor_of(const py::list& tensors) {
  const Py_ssize_t size = PyList_GET_SIZE(tensors.ptr());
  py::list out(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    const c10::TensorImpl* source = THPVariable_Unpack(PyList_GET_ITEM(tensors.ptr(), i)).unsafeGetTensorImpl();
    const at::DataPtr& data = source->storage().data_ptr();
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                         source->storage().nbytes(),
                                                         at::DataPtr(data.get(), nullptr, &keep, data.device()),
                                                         nullptr,
                                                         false);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), source->key_set(), source->dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(source->sizes(), source->strides());
    PyList_SET_ITEM(out.ptr(), i, THPVariable_Wrap(std::move(tensor)));
  }
  return out;
}

// A structure of tensors as a C++ program would hold it; lists and dicts (of str keys) take their first element's type.
// torch's own conversion is not exported by every release.
c10::IValue to_ivalue(const py::handle& in) {
  if (THPVariable_Check(in.ptr())) {
    return THPVariable_Unpack(in.ptr());
  }
  std::vector<c10::IValue> values;
  if (py::isinstance<py::dict>(in)) {
    const auto dict = py::reinterpret_borrow<py::dict>(in);
    for (const auto& item : dict) {
      values.push_back(to_ivalue(item.second));
    }
    c10::impl::GenericDict out(c10::StringType::get(), values.at(0).type());
    size_t i = 0;
    for (const auto& item : dict) {
      out.insert(item.first.cast<std::string>(), values[i++]);
    }
    return out;
  }
  for (const auto& element : py::reinterpret_borrow<py::sequence>(in)) {
    values.push_back(to_ivalue(element));
  }
  if (py::isinstance<py::tuple>(in)) {
    return c10::ivalue::Tuple::create(std::move(values));
  }
  c10::impl::GenericList out(values.at(0).type());
  for (const auto& value : values) {
    out.push_back(value);
  }
  return out;
}

// A C++ program that calls the op through the dispatcher: the structure is an IValue from the start, and no Python
// runs.
class OpLoop {
 public:
  explicit OpLoop(const py::object& out)
      : argument_(to_ivalue(out)),
        op_(c10::Dispatcher::singleton().findSchemaOrThrow("weakref_ext::weak_ref_tensors", "ivalue")) {
  }

  // Seconds that this many calls take, as Python's timeit.
  double timeit(int64_t calls) const {
    const py::gil_scoped_release no_gil;
    torch::jit::Stack stack;
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) {
      stack.emplace_back(argument_);
      op_.callBoxed(stack);
      stack.clear();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  c10::IValue argument_;
  c10::OperatorHandle op_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("floor_of", &floor_of);
  py::class_<OpLoop>(m, "OpLoop").def(py::init<const py::object&>()).def("timeit", &OpLoop::timeit);
}
