// Weights of eight bits: see int8.h.

#include "int8.h"

#include "share.h"

namespace hibachi::int8 {

template <class T, class Out>
static void linear(
    const typename T::Element* x,
    int64_t stride,
    const uint32_t* w,
    const float* scales,
    const typename T::Element* bias,
    typename Out::Element* y,
    int64_t m,
    int64_t n,
    int64_t k
) {
  std::vector<uint64_t> memory(up(Rounded::bytes(m, k), sizeof(uint64_t)));
  Rounded rounded(memory.data(), m, k);
  share(Round<T>{x, stride, rounded, m, k});
  share(Linear<T, Out>{rounded, w, scales, bias, y, n, m, n, k});
}

}  // namespace hibachi::int8

using namespace hibachi;

extern "C" {

int64_t hibachi_int8_panel() { return int8::WIDTH; }

// Bytes of a row of k numbers, rounded.
int64_t hibachi_int8_rounded(int64_t k) { return int8::Rounded::bytes(1, k); }

void hibachi_int8_linear_f32(
    const float* x,
    int64_t stride,
    const uint32_t* w,
    const float* scales,
    const float* b,
    float* y,
    int64_t m,
    int64_t n,
    int64_t k
) {
  int8::linear<F32, F32>(x, stride, w, scales, b, y, m, n, k);
}

void hibachi_int8_linear_bf16(
    const uint16_t* x,
    int64_t stride,
    const uint32_t* w,
    const float* scales,
    const uint16_t* b,
    uint16_t* y,
    int64_t m,
    int64_t n,
    int64_t k
) {
  int8::linear<Bf16, Bf16>(x, stride, w, scales, b, y, m, n, k);
}

void hibachi_int8_linear_bf16_f32(
    const uint16_t* x,
    int64_t stride,
    const uint32_t* w,
    const float* scales,
    const uint16_t* b,
    float* y,
    int64_t m,
    int64_t n,
    int64_t k
) {
  int8::linear<Bf16, F32>(x, stride, w, scales, b, y, m, n, k);
}

void hibachi_int8_pack(const float* w, uint8_t* packed, float* scales, int64_t n, int64_t k) {
  share(int8::Pack{w, packed, scales, n, k});
}

void hibachi_int8_rows_f32(
    const uint8_t* packed, const float* scales, const int32_t* at, float* out, int64_t count, int64_t k
) {
  share(int8::Rows<F32>{packed, scales, at, out, count, k});
}

void hibachi_int8_rows_bf16(
    const uint8_t* packed, const float* scales, const int32_t* at, uint16_t* out, int64_t count, int64_t k
) {
  share(int8::Rows<Bf16>{packed, scales, at, out, count, k});
}
}
