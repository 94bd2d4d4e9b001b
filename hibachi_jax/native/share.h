// Kernels on the threads of XLA.

#pragma once

#include <atomic>
#include <memory>

#include "lanes.h"
#include "xla/ffi/api/ffi.h"

namespace hibachi {

// The parts of a kernel, which threads take a batch at a time. It outlives the call: a thread may come too late, and
// finds nothing left then.
template <class K>
struct Work {
  const K& kernel;  // of the caller, who waits until all parts are done
  const int64_t n, batch;
  std::atomic<int64_t> next{0}, done{0};

  Work(const K& kernel, int64_t n, int64_t batch) : kernel(kernel), n(n), batch(batch) {}

  void take() {
    for (int64_t i; (i = next.fetch_add(batch, std::memory_order_relaxed)) < n;) {
      const int64_t end = std::min(i + batch, n), many = end - i;
      for (; i < end; i++) kernel(i);
      done.fetch_add(many, std::memory_order_release);
    }
  }
};

// All parts of a kernel, by the caller and by whoever of the pool is free. Nobody waits for a thread that has not
// begun: the pool may be busy with callers of ours.
template <class K>
inline void share(xla::ffi::ThreadPool& pool, const K& kernel) {
  const int64_t n = kernel.count(), all = std::max<int64_t>(1, pool.num_threads()), batch = kernel.batch(all);
  const int64_t threads = std::min<int64_t>(all, (n + batch - 1) / batch);
  if (threads <= 1) {
    for (int64_t i = 0; i < n; i++) kernel(i);
    return;
  }
  auto work = std::make_shared<Work<K>>(kernel, n, batch);
  for (int64_t i = 1; i < threads; i++) pool.Schedule([work] { work->take(); });
  work->take();
  for (int i = 0; work->done.load(std::memory_order_acquire) < n; i++) {
    if (i > 20000) sched_yield();
#ifdef __x86_64__
    else __builtin_ia32_pause();
#endif
  }
}

}  // namespace hibachi
