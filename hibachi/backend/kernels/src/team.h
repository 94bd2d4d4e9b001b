// Threads of our own, for which nobody waits.
//
// A job is a list of operations, each of a number of parts. Who is free takes the next parts of the operation that is
// on; who finishes its last part opens the next one. So the caller waits for parts that somebody has begun, never for
// a thread that has not come, and a thread without a part touches nothing of the caller's. Threads are awake for a
// moment after each job, and then sleep until the next one.
//
// Where others have the processor, a thread may be stopped in the middle of a part, for milliseconds. The caller counts
// what the others save it, and how long it waits for them; while that is more, it does without them.
//
// One caller has the team at a time; another one works alone meanwhile. No result depends on who computes a part.

#pragma once

#include <cstdint>

#include "memory.h"

namespace hibachi {

struct Job {
  void (*run)(const void* what, int64_t operation, int64_t begin, int64_t end, int thread);
  const void* what;
  const int64_t *counts, *batches;  // of each operation: its parts, and how many are taken at once
  int64_t operations;
  int threads;                // that may work on it, with the caller
  double* seconds = nullptr;  // of each operation, added up; or nullptr
};

int threads();  // of the team, with the caller
void set_threads(int n);

void work(const Job& job);

// Bytes that a kernel wants for each thread; such a kernel is called with them.
template <class K>
int64_t scratch_of(const K& kernel) {
  if constexpr (requires { kernel.scratch(); }) return up(kernel.scratch(), 64) * 64;
  else return 0;
}

template <class K>
void run_parts(const K& kernel, int64_t begin, int64_t end, char* scratch) {
  for (int64_t i = begin; i < end; i++) {
    if constexpr (requires { kernel.scratch(); }) kernel(i, scratch);
    else kernel(i);
  }
}

// All parts of one kernel. false: there is no memory.
template <class K>
[[nodiscard]] bool share(const K& kernel) {
  const int crew = threads();
  const int64_t count = kernel.count(), batch = kernel.batch(crew), each = scratch_of(kernel);
  const Buffer<char> scratch(each * crew);
  if (!scratch.ok()) return false;
  struct One {
    const K& kernel;
    char* scratch;
    int64_t each;
  } const one{kernel, scratch.data(), each};
  const auto run = [](const void* what, int64_t, int64_t begin, int64_t end, int thread) {
    const One& o = *static_cast<const One*>(what);
    run_parts(o.kernel, begin, end, o.scratch + thread * o.each);
  };
  work({run, &one, &count, &batch, 1, crew});
  return true;
}

}  // namespace hibachi
