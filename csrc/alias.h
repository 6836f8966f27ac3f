#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <utility>
#include <vector>

namespace weakref_ext {

// Why `tensor` has no non-owning alias, as a clause for an error message; nullptr when it has one.
const char* refusal(const at::Tensor& tensor);

// True for a tensor whose storage was made by `Aliases` (and for views of it).
bool is_weak_ref(const at::Tensor& tensor);

// False once the storage that a weak ref was made from has given its memory back. A tensor that owns its memory
// is its own owner.
bool owner_alive(const at::Tensor& tensor);

// Whether `candidate` is over the storage that the weak ref `tensor` was made from.
bool owns(const at::Tensor& candidate, const at::Tensor& tensor);

// WEAKREF_EXT_DISABLE=1, read once; warns at the first call that it takes effect in. Weak refs are then the tensors
// themselves, so that a run with and without them can be compared.
bool disabled();

// What one walk has made so far from sources that it may meet again. Keeps sources alive, so that an address cannot
// come to mean another source before the walk ends. Empty, it costs nothing to make and to drop.
template <class T> class Memo {
 public:
  const T* find(const T& source) const {
    if (index_) {
      const auto found = index_->find(key(source));
      return found == index_->end() ? nullptr : &made_[found->second].second;
    }
    for (const auto& [seen, alias] : made_) {
      if (key(seen) == key(source)) {
        return &alias;
      }
    }
    return nullptr;
  }

  void add(const T& source, const T& alias) {
    made_.emplace_back(source, alias);
    if (!index_ && made_.size() > kScanned) {
      index_ = std::make_unique<Index>();
      for (size_t i = 0; i < made_.size(); ++i) {
        index_->emplace(key(made_[i].first), i);
      }
    } else if (index_) {
      index_->emplace(key(source), made_.size() - 1);
    }
  }

 private:
  using Index = ska::flat_hash_map<const void*, size_t>;
  static constexpr size_t kScanned = 16; // up to here a linear scan beats hashing

  static const void* key(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl();
  }
  static const void* key(const c10::Storage& storage) {
    return storage.unsafeGetStorageImpl();
  }

  std::vector<std::pair<T, T>> made_;
  std::unique_ptr<Index> index_;
};

// Makes the aliases of one walk: one tensor gives one alias, and tensors that share a storage give aliases that share
// one. `source` must pass `refusal`. No dispatcher call, no CUDA call, no synchronization.
class Aliases {
 public:
  // `repeats`: false promises that the walk meets this tensor only once.
  at::Tensor of(const at::Tensor& source, bool repeats);

 private:
  c10::Storage weak_storage(const c10::Storage& source);

  Memo<at::Tensor> tensors_;
  Memo<c10::Storage> storages_;
};

} // namespace weakref_ext
