#include "alias.h"

#include "recycled.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/env.h>

namespace weakref_ext {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;

// The deleter of every weak storage, and the mark by which one is known. The DataPtr's context is the root owner's
// StorageImpl, held by its weak count: its memory may go, its counts stay readable.
void release_owner(void* owner) {
  c10::raw::weak_intrusive_ptr::decref(static_cast<StorageImpl*>(owner));
}

bool is_weak(const c10::Storage& storage) {
  return storage.data_ptr().get_deleter() == &release_owner;
}

StorageImpl* root_of(const c10::Storage& storage) {
  return is_weak(storage) ? static_cast<StorageImpl*>(storage.data_ptr().get_context())
                          : storage.unsafeGetStorageImpl();
}

// Neither owning nor resizable. Out-of-tree backends (PrivateUse1) may have a StorageImpl of their own; the built-in
// ones have not, and are spared the look-up.
c10::intrusive_ptr<StorageImpl> make_storage(c10::SymInt nbytes, at::DataPtr data) {
  const c10::Device device = data.device();
  if (C10_UNLIKELY(device.type() == c10::DeviceType::PrivateUse1)) {
    return c10::make_storage_impl(
        StorageImpl::use_byte_size_t(), std::move(nbytes), std::move(data), nullptr, false, device);
  }
  return c10::make_intrusive<Recycled<StorageImpl>>(
      StorageImpl::use_byte_size_t(), std::move(nbytes), std::move(data), nullptr, false);
}

class WeakTensorImpl final : public Recycled<c10::TensorImpl> {
 public:
  // The base's constructor adds or drops the autograd keys as the grad and inference modes want it. Sizes, strides and
  // what torch has derived from them are copied, not computed again.
  WeakTensorImpl(c10::Storage&& storage, const c10::TensorImpl& source)
      : Recycled(std::move(storage), source.key_set(), source.dtype()) {
    copy_generic_tensor_metadata(&source, this);
  }
};

// Keys that a plain strided tensor may carry, on any backend. All others (sparse, nested, quantized, opaque, Python,
// functorch, functionalization, named) say that the tensor is more than sizes and strides over a storage.
constexpr DispatchKeySet aliasable = DispatchKeySet(DispatchKeySet::RAW, c10::full_backend_mask) |
                                     DispatchKeySet({DispatchKey::Dense,
                                                     DispatchKey::BackendSelect,
                                                     DispatchKey::Conjugate,
                                                     DispatchKey::Negative,
                                                     DispatchKey::ZeroTensor,
                                                     DispatchKey::ADInplaceOrView}) |
                                     c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;

} // namespace

const char* refusal(const at::Tensor& tensor) {
  if (C10_UNLIKELY(!tensor.defined())) {
    return "an undefined tensor";
  }
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const DispatchKeySet keys = impl->key_set();
  if (C10_LIKELY((keys.raw_repr() & ~aliasable.raw_repr()) == 0 && impl->has_storage())) {
    return nullptr;
  }
  if (keys.has_any(DispatchKeySet({DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper}))) {
    return "a tensor inside a functorch transform (vmap, grad, jvp), which is a wrapper without memory of its own; "
           "call the op outside the transform";
  }
  if (keys.has_any(DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Functionalize}))) {
    return "a tensor subclass with __torch_dispatch__ (FakeTensor, FunctionalTensor, a wrapper), which has no memory "
           "of its own to alias; weak refs belong outside compiled and traced regions";
  }
  if (tensor.is_quantized()) {
    return "a quantized tensor, whose quantizer an alias would lose; pass int_repr() instead";
  }
  return "a tensor that is more than sizes and strides over one storage (sparse, mkldnn, nested, named); pass the dense "
         "tensors that it is made of instead";
}

bool is_weak_ref(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && is_weak(tensor.storage());
}

bool owner_alive(const at::Tensor& tensor) {
  if (!is_weak_ref(tensor)) {
    return true;
  }
  // Locked: the last strong reference may go on another thread while this one compares.
  const auto owner =
      c10::intrusive_ptr<StorageImpl>::reclaim(c10::raw::weak_intrusive_ptr::lock(root_of(tensor.storage())));
  // An owner that was resized to nothing lives on without the memory.
  return owner.defined() && owner->_mutable_data_ptr_no_checks().get() == tensor.storage().data_ptr().get();
}

bool owns(const at::Tensor& candidate, const at::Tensor& tensor) {
  return is_weak_ref(tensor) && refusal(candidate) == nullptr &&
         candidate.storage().unsafeGetStorageImpl() == root_of(tensor.storage());
}

bool disabled() {
  static const bool value = [] {
    const bool set = c10::utils::check_env("WEAKREF_EXT_DISABLE") == true;
    if (set) {
      TORCH_WARN("WEAKREF_EXT_DISABLE is set: weak refs are the tensors themselves, and keep their memory");
    }
    return set;
  }();
  return value;
}

c10::Storage Aliases::weak_storage(const c10::Storage& source) {
  const bool shared = source.use_count() > 1;
  if (shared) {
    if (const c10::Storage* made = storages_.find(source.unsafeGetStorageImpl())) {
      return *made;
    }
  }
  // mutable_data_ptr: a copy-on-write storage must own its bytes before anyone aliases them.
  const at::DataPtr& data = source.mutable_data_ptr();
  StorageImpl* root = root_of(source);
  c10::raw::weak_intrusive_ptr::incref(root);
  c10::Storage weak(make_storage(source.sym_nbytes(), at::DataPtr(data.get(), root, &release_owner, data.device())));
  if (shared) {
    storages_.add(source.unsafeGetStorageImpl(), source, weak);
  }
  return weak;
}

at::Tensor Aliases::of(const at::Tensor& source) {
  const c10::TensorImpl* impl = source.unsafeGetTensorImpl();
  return at::detail::make_tensor<WeakTensorImpl>(weak_storage(impl->storage()), *impl);
}

} // namespace weakref_ext
