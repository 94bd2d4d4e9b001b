// Kernels on torch's threads.

#pragma once

#include <ATen/Parallel.h>

#include <atomic>

#include "lanes.h"

namespace hibachi {

// All parts of a kernel: each thread takes a batch at a time while there are any.
template <class K>
inline void share(const K& kernel) {
  const int64_t n = kernel.count(), batch = kernel.batch(at::get_num_threads());
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (n + batch - 1) / batch);
  if (threads <= 1) {
    for (int64_t i = 0; i < n; i++) kernel(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(batch)) < n;)
      for (int64_t end = std::min(i + batch, n); i < end; i++) kernel(i);
  });
}

}  // namespace hibachi
