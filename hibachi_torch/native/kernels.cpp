// The operations by themselves, for Python.

#include "attention.h"
#include "linear.h"
#include "share.h"
#include "small.h"

namespace hibachi {

template <class T, class Out>
static void linear(
    const typename T::Element* x,
    int64_t stride,
    const typename T::Lane* w,
    const typename T::Element* bias,
    typename Out::Element* y,
    int64_t m,
    int64_t n,
    int64_t k
) {
  std::vector<typename T::Element> copy;
  if (k % T::DEPTH || stride % T::DEPTH) {  // rows must be whole lanes
    int64_t whole = (k + T::DEPTH - 1) / T::DEPTH * T::DEPTH;
    copy.resize(m * whole);
    for (int64_t i = 0; i < m; i++) std::copy_n(x + i * stride, k, copy.data() + i * whole);
    x = copy.data();
    k = stride = whole;
  }
  share(
      Linear<T, Out>{.x = x, .x_stride = stride, .w = w, .bias = bias, .y = y, .y_stride = n, .m = m, .n = n, .k = k}
  );
}

template <class T>
static void attend(
    const Sizes& s,
    const typename T::Element* q,
    const typename T::Element* k,
    const typename T::Element* v,
    typename T::Element* keys,
    typename T::Element* values,
    const int32_t* slot,
    const int32_t* pos,
    const int32_t* cu_q,
    const int32_t* table,
    bool cascade,
    typename T::Element* out
) {
  share(Write<T>{s, Layout<T>(s), k, v, keys, values, slot});
  int64_t done = cu_q[s.rows], each = s.heads * s.v_dim;  // tokens after that are padding
  std::fill_n(out + done * each, (s.tokens - done) * each, typename T::Element{});
  std::vector<Tile> work;
  const Attention<T> attention{s, Layout<T>(s), q, keys, values, pos, table, out, work};
  if (cascade) {
    const std::vector<Set> some = sets(s, cu_q, pos, table, at::get_num_threads(), work);
    share(Cascade<T>{attention, some});
  } else {
    work = tiles(s, cu_q);
    share(attention);
  }
}

template <class T>
static void rms_norm(
    const typename T::Element* x,
    int64_t stride,
    const typename T::Element* w,
    typename T::Element* y,
    int64_t rows,
    int64_t dim,
    float eps
) {
  share(RmsNorm<T>{{x, stride, 1, dim}, w, {y, dim, 1, dim}, rows, dim, eps});
}

template <class T>
static void layer_norm(
    const typename T::Element* x,
    int64_t stride,
    const typename T::Element* w,
    const typename T::Element* b,
    typename T::Element* y,
    int64_t rows,
    int64_t dim,
    float eps
) {
  share(LayerNorm<T>{{x, stride, 1, dim}, w, b, {y, dim, 1, dim}, rows, dim, eps});
}

template <class T>
static void rope(
    const typename T::Element* x,
    int64_t stride,
    const typename T::Element* cos,
    const typename T::Element* sin,
    typename T::Element* y,
    int64_t tokens,
    int64_t heads,
    int64_t dim
) {
  share(Rope<T>{{x, stride, heads, dim}, cos, sin, {y, heads * dim, heads, dim}, tokens, dim / 2});
}

template <class T>
static void activate(
    int which,
    const typename T::Element* x,
    int64_t stride,
    typename T::Element* y,
    int64_t rows,
    int64_t dim,
    bool gated
) {
  share(Activate<T>{Activation(which), gated, x, stride, y, dim, rows, dim});
}

}  // namespace hibachi

using namespace hibachi;

extern "C" {
void hibachi_best_f32(const float* x, int64_t rows, int64_t columns, int32_t* place, float* most) {
  share(Best{x, rows, columns, place, most});
}

int64_t hibachi_panel() { return WIDTH; }
int64_t hibachi_sizeof_Sizes() { return sizeof(Sizes); }

// How many sets of tiles attention makes of a step.
int64_t hibachi_sets(const Sizes* s, const int32_t* cu_q, const int32_t* pos, const int32_t* table, int threads) {
  std::vector<Tile> all;
  return sets(*s, cu_q, pos, table, threads, all).size();
}

void hibachi_linear_f32(
    const float* x, int64_t stride, const float* w, const float* b, float* y, int64_t m, int64_t n, int64_t k
) {
  linear<F32, F32>(x, stride, w, b, y, m, n, k);
}

void hibachi_linear_bf16(
    const uint16_t* x,
    int64_t stride,
    const uint32_t* w,
    const uint16_t* b,
    uint16_t* y,
    int64_t m,
    int64_t n,
    int64_t k
) {
  linear<Bf16, Bf16>(x, stride, w, b, y, m, n, k);
}

void hibachi_linear_bf16_f32(
    const uint16_t* x, int64_t stride, const uint32_t* w, const uint16_t* b, float* y, int64_t m, int64_t n, int64_t k
) {
  linear<Bf16, F32>(x, stride, w, b, y, m, n, k);
}

void hibachi_pack_f32(const float* w, float* packed, int64_t n, int64_t k) { share(Pack<F32>{w, packed, n, k}); }
void hibachi_pack_bf16(const uint16_t* w, uint16_t* packed, int64_t n, int64_t k) {
  share(Pack<Bf16>{w, packed, n, k});
}

void hibachi_rows_f32(const float* packed, const int32_t* at, float* out, int64_t count, int64_t k) {
  share(Rows<F32>{packed, at, out, count, k});
}

void hibachi_rows_bf16(const uint16_t* packed, const int32_t* at, uint16_t* out, int64_t count, int64_t k) {
  share(Rows<Bf16>{packed, at, out, count, k});
}

void hibachi_attend_f32(
    const Sizes* s,
    const float* q,
    const float* k,
    const float* v,
    float* keys,
    float* values,
    const int32_t* slot,
    const int32_t* pos,
    const int32_t* cu_q,
    const int32_t* table,
    int cascade,
    float* out
) {
  attend<F32>(*s, q, k, v, keys, values, slot, pos, cu_q, table, cascade, out);
}

void hibachi_attend_bf16(
    const Sizes* s,
    const uint16_t* q,
    const uint16_t* k,
    const uint16_t* v,
    uint16_t* keys,
    uint16_t* values,
    const int32_t* slot,
    const int32_t* pos,
    const int32_t* cu_q,
    const int32_t* table,
    int cascade,
    uint16_t* out
) {
  attend<Bf16>(*s, q, k, v, keys, values, slot, pos, cu_q, table, cascade, out);
}

void hibachi_rms_norm_f32(
    const float* x, int64_t stride, const float* w, float* y, int64_t rows, int64_t dim, float eps
) {
  rms_norm<F32>(x, stride, w, y, rows, dim, eps);
}

void hibachi_rms_norm_bf16(
    const uint16_t* x, int64_t stride, const uint16_t* w, uint16_t* y, int64_t rows, int64_t dim, float eps
) {
  rms_norm<Bf16>(x, stride, w, y, rows, dim, eps);
}

void hibachi_layer_norm_f32(
    const float* x, int64_t stride, const float* w, const float* b, float* y, int64_t rows, int64_t dim, float eps
) {
  layer_norm<F32>(x, stride, w, b, y, rows, dim, eps);
}

void hibachi_layer_norm_bf16(
    const uint16_t* x,
    int64_t stride,
    const uint16_t* w,
    const uint16_t* b,
    uint16_t* y,
    int64_t rows,
    int64_t dim,
    float eps
) {
  layer_norm<Bf16>(x, stride, w, b, y, rows, dim, eps);
}

void hibachi_rope_f32(
    const float* x,
    int64_t stride,
    const float* cos,
    const float* sin,
    float* y,
    int64_t tokens,
    int64_t heads,
    int64_t dim
) {
  rope<F32>(x, stride, cos, sin, y, tokens, heads, dim);
}

void hibachi_rope_bf16(
    const uint16_t* x,
    int64_t stride,
    const uint16_t* cos,
    const uint16_t* sin,
    uint16_t* y,
    int64_t tokens,
    int64_t heads,
    int64_t dim
) {
  rope<Bf16>(x, stride, cos, sin, y, tokens, heads, dim);
}

void hibachi_activate_f32(int which, const float* x, int64_t stride, float* y, int64_t rows, int64_t dim, int gated) {
  activate<F32>(which, x, stride, y, rows, dim, gated);
}

void hibachi_activate_bf16(
    int which, const uint16_t* x, int64_t stride, uint16_t* y, int64_t rows, int64_t dim, int gated
) {
  activate<Bf16>(which, x, stride, y, rows, dim, gated);
}
}
