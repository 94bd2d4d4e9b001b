// The plain C interface. ABI goes up by one with each change of it.

#pragma once

#include <cstdint>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

constexpr int32_t ABI = 1;  // as in abi.py

namespace hibachi {
struct Sizes;
}

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
