#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <utility>

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

// What one walk has made so far from sources that it may meet again. Holds the sources, so that an address cannot come
// to mean another source before the walk ends. Empty, it costs nothing to make and to drop.
template <class Holder> class Memo {
 public:
  const Holder* find(const void* source) const {
    if (index_) {
      const auto found = index_->find(source);
      return found == index_->end() ? nullptr : &made_[found->second].result;
    }
    for (const Entry& entry : made_) {
      if (entry.key == source) {
        return &entry.result;
      }
    }
    return nullptr;
  }

  void add(const void* key, Holder source, Holder result) {
    made_.push_back(Entry{key, std::move(source), std::move(result)});
    if (index_) {
      index_->emplace(key, made_.size() - 1);
    } else if (made_.size() > kScanned) {
      index_ = std::make_unique<Index>();
      for (size_t i = 0; i < made_.size(); ++i) {
        index_->emplace(made_[i].key, i);
      }
    }
  }

 private:
  struct Entry {
    const void* key;
    Holder source;
    Holder result;
  };
  using Index = ska::flat_hash_map<const void*, size_t>;
  static constexpr size_t kScanned = 16; // up to here a linear scan beats hashing

  c10::SmallVector<Entry, 8> made_;
  std::unique_ptr<Index> index_;
};

// Makes the aliases of one walk: tensors that share a storage give aliases that share one. No dispatcher call, no CUDA
// call, no synchronization.
class Aliases {
 public:
  // `source` must pass `refusal`.
  at::Tensor of(const at::Tensor& source);

 private:
  c10::Storage weak_storage(const c10::Storage& source);

  Memo<c10::Storage> storages_;
};

} // namespace weakref_ext
