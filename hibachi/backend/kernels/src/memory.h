// Memory that is asked for, and may not be had.

#pragma once

#include <cstdint>
#include <cstdlib>

namespace hibachi {

inline int64_t up(int64_t n, int64_t of) { return (n + of - 1) / of; }

// Uninitialised elements, on a cache line.
template <class E>
class Buffer {
 public:
  explicit Buffer(int64_t count) : memory(count ? std::malloc(count * sizeof(E) + 64) : nullptr), wanted(count) {}
  ~Buffer() { std::free(memory); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool ok() const { return memory || !wanted; }
  E* data() const { return reinterpret_cast<E*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t(63)); }
  E& operator[](int64_t i) const { return data()[i]; }

 private:
  void* memory;
  int64_t wanted;
};

}  // namespace hibachi
