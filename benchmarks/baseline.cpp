// What the benchmarks compare with: a per-tensor op as the engines register it, and the least that a walk must do.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

// One tensor through the dispatcher, for the backend key, with its geometry copied into vectors: vLLM's and SGLang's op.
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

void keep(void*) {}

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

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("floor_of", &floor_of);
}
