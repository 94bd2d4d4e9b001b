// The plain C interface. ABI goes up by one with each change of it.

#pragma once

#include <cstdint>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

constexpr int32_t ABI = 2;  // as in abi.py

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
// [dim, inner]; their scales, or nullptr.
struct Mixture {
  int64_t tokens, each, experts, dim, inner, activation, gated;
  const void *const *into, *const *out;
  const float *const *into_scales, *const *out_scales;
};

}  // namespace hibachi

// What a function returns that may not do it: then it has done nothing.
enum : int { DONE, NO_MEMORY, OUTSIDE };  // OUTSIDE: a place is not in the array that it is a place of

extern "C" {
int hibachi_linear(
    int dtype,
    int wide,
    const void* x,
    int64_t stride,
    const void* w,
    const void* b,
    void* y,
    int64_t m,
    int64_t n,
    int64_t k
);
int hibachi_pack(int dtype, const void* w, void* packed, int64_t n, int64_t k);
int hibachi_rows(int dtype, const void* packed, const int32_t* at, void* y, int64_t many, int64_t n, int64_t k);
int hibachi_int8_linear(
    int dtype,
    int wide,
    const void* x,
    int64_t stride,
    const void* w,
    const float* scales,
    const void* b,
    void* y,
    int64_t m,
    int64_t n,
    int64_t k
);
int hibachi_int8_pack(const float* w, void* packed, float* scales, int64_t n, int64_t k);
int hibachi_int8_rows(
    int dtype, const void* packed, const float* scales, const int32_t* at, void* y, int64_t many, int64_t n, int64_t k
);
int hibachi_attend(
    int dtype,
    const hibachi::Sizes* sizes,
    const void* q,
    const void* k,
    const void* v,
    void* keys,
    void* values,
    const int32_t* slot,
    const int32_t* pos,
    const int32_t* cu_q,
    const int32_t* table,
    int cascade,
    void* y
);
int hibachi_rms_norm(
    int dtype, const void* x, int64_t stride, const void* w, void* y, int64_t rows, int64_t dim, float eps
);
int hibachi_layer_norm(
    int dtype,
    const void* x,
    int64_t stride,
    const void* w,
    const void* b,
    void* y,
    int64_t rows,
    int64_t dim,
    float eps
);
int hibachi_softmax(int dtype, const void* x, void* y, int64_t rows, int64_t dim);
int hibachi_rope(
    int dtype,
    const void* x,
    int64_t stride,
    const void* cos,
    const void* sin,
    void* y,
    int64_t tokens,
    int64_t heads,
    int64_t dim
);
int hibachi_activate(
    int dtype, int which, const void* x, int64_t stride, void* y, int64_t rows, int64_t dim, int gated
);
int hibachi_convolve(
    int dtype,
    const void* past,
    const void* x,
    int64_t x_stride,
    const void* w,
    const void* b,
    void* y,
    void* last,
    int64_t rows,
    int64_t tokens,
    int64_t dim,
    int64_t width
);
int hibachi_scan(int dtype, const hibachi::Scanned* s);
int hibachi_route(
    int dtype,
    const void* x,
    int64_t tokens,
    int64_t experts,
    int64_t each,
    int normalised,
    float* weights,
    int32_t* chosen
);
int hibachi_experts(
    int dtype, const hibachi::Mixture* m, const void* x, const float* weights, const int32_t* chosen, void* y
);
int hibachi_best(const float* x, int64_t rows, int64_t columns, int32_t* place, float* most);
int hibachi_draw(
    const float* x,
    int64_t rows,
    int64_t columns,
    const float* temperature,
    const int32_t* top_k,
    const float* top_p,
    const float* min_p,
    const float* typical_p,
    const float* u,
    int32_t* token,
    float* most
);
int hibachi_mass(const float* x, int64_t rows, int64_t columns, float* most, float* mass);
}
