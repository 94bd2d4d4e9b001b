// The plain C interface. ABI goes up by one with each change of it.

#pragma once

#include <cstdint>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

constexpr int32_t ABI = 11;  // as in abi.py

namespace hibachi {

struct Sizes;

// The arguments of a scan; see Scan in states.h.
struct Scanned {
  int64_t rows, tokens, dim, size, dt_stride, x_stride, gate_stride, in_stride, out_stride;
  const float* state;
  const void *dt, *x, *gate, *in, *out;
  const float *decay, *skip;
  void* y;
  float* last;
};

// A mixture of experts: for each of them the packed matrices [inner, dim], or [2 * inner, dim] if it is gated, and
// [dim, inner], of kinds of `Panels` (blocks.h); their scales, if they are of int8. leaves: 0, or the result is the sum
// of so many leaves (linear.h) of what comes out, in float32.
struct Mixture {
  int64_t tokens, each, experts, dim, inner, activation, gated, into_kind, out_kind, leaves = 0;
  const void *const *into, *const *out;
  const float *const *into_scales, *const *out_scales;
};

}  // namespace hibachi

// What a function returns that may not do it: then it has done nothing.
enum : int { DONE, NO_MEMORY, OUTSIDE };  // OUTSIDE: a place is not in the array that it is a place of
