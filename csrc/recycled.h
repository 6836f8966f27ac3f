#pragma once

#include <cstddef>
#include <new>

namespace weakref_ext {

// A class of torch's whose objects leave their memory, when they are freed, to the next one that the same thread makes:
// malloc and free are a seventh of a walk whose results are dropped again. Each thread keeps at most kMost.
template <class Base> class Recycled : public Base {
 public:
  using Base::Base;

  static void* operator new(size_t size) {
    Block* const block = kept_.first;
    if (block == nullptr || size != sizeof(Recycled)) {
      return ::operator new(size);
    }
    kept_.first = block->next;
    --kept_.count;
    return block;
  }

  static void operator delete(void* memory, size_t size) {
    if (kept_.count >= kMost || size != sizeof(Recycled)) {
      return ::operator delete(memory);
    }
    if (kept_.count == 0) {
      static thread_local const AtExit at_exit; // here, where a thread comes seldom: its use costs a check
      static_cast<void>(at_exit);
    }
    kept_.first = new (memory) Block{kept_.first};
    ++kept_.count;
  }

 private:
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr int kMost = 0; // or a use after free would go unseen
#else
  static constexpr int kMost = 64;
#endif

  struct Block {
    Block* next;
  };

  // Not the list's own destructor: objects that are freed after it, at the end of a thread, must still find the list.
  struct AtExit {
    AtExit() = default;
    ~AtExit() {
      while (Block* const block = kept_.first) {
        kept_.first = block->next;
        ::operator delete(block);
      }
      kept_.count = kMost; // the thread keeps no more
    }
  };

  struct Kept {
    Block* first;
    int count;
  };
  static inline thread_local Kept kept_{};
};

} // namespace weakref_ext
