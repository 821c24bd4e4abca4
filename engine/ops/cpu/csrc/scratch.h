// Memory that a thread keeps between calls: kernels allocate nothing in their inner life.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace cpu_ops {
namespace {

class Scratch {
 public:
  // At least `count` elements, aligned to a cache line; their contents are what the last use left.
  template <class T>
  T* get(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    if (bytes > bytes_) {
      memory_.reset(std::aligned_alloc(64, bytes));
      if (memory_ == nullptr) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t bytes_ = 0;
};

}  // namespace
}  // namespace cpu_ops
