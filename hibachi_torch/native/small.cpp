// What is done with each token between the products.

#include "lanes.h"

namespace hibachi {

// Elements that are worth waking another thread for: of what is read and written once, and of what takes an exp.
constexpr int64_t LIGHT = 32768, HEAVY = 8192;

// Sums of squares of 16 lanes each, then of the lanes.
template <class T>
static void rms_norm(
    const typename T::Element* x, int64_t stride, const typename T::Element* w, typename T::Element* y, int64_t rows, int64_t dim, float eps
) {
  share(rows, std::max<int64_t>(1, LIGHT / dim), [&](int64_t i) {
    const auto* from = x + i * stride;
    Floats squares = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      Floats v = read_some<T>(from + d, dim - d);
      squares = fma(v, v, squares);
    }
    Floats by = all(1.0f / std::sqrt(sum(squares) / dim + eps));
    for (int64_t d = 0; d < dim; d += LANES) {
      int n = std::min<int64_t>(LANES, dim - d);
      write_some<T>(y + i * dim + d, read_some<T>(from + d, n) * by * read_some<T>(w + d, n), n);
    }
  });
}

// y [tokens, heads, dim] from x with rows `stride` apart; cos, sin [tokens, dim / 2].
template <class T>
static void rope(
    const typename T::Element* x, int64_t stride, const typename T::Element* cos, const typename T::Element* sin, typename T::Element* y, int64_t tokens, int64_t heads, int64_t dim
) {
  int64_t half = dim / 2;
  share(tokens, std::max<int64_t>(1, LIGHT / (heads * dim)), [&](int64_t t) {
    for (int64_t h = 0; h < heads; h++) {
      const auto* from = x + t * stride + h * dim;
      auto* to = y + (t * heads + h) * dim;
      for (int64_t d = 0; d < half; d += LANES) {
        int n = std::min<int64_t>(LANES, half - d);
        Floats a = read_some<T>(from + d, n), b = read_some<T>(from + half + d, n);
        Floats c = read_some<T>(cos + t * half + d, n), s = read_some<T>(sin + t * half + d, n);
        write_some<T>(to + d, fma(a, c, -(b * s)), n);
        write_some<T>(to + half + d, fma(b, c, a * s), n);
      }
    }
  });
}

// y [rows, dim] = act(x) * the `dim` numbers after it, or act(x) alone.
template <class T, class Act>
static void activate(
    const typename T::Element* x, int64_t stride, typename T::Element* y, int64_t rows, int64_t dim, bool gated, const Act& act
) {
  share(rows, std::max<int64_t>(1, HEAVY / dim), [&](int64_t i) {
    const auto* from = x + i * stride;
    for (int64_t d = 0; d < dim; d += LANES) {
      int n = std::min<int64_t>(LANES, dim - d);
      Floats a = act(read_some<T>(from + d, n));
      if (gated) a = a * read_some<T>(from + dim + d, n);
      write_some<T>(y + i * dim + d, a, n);
    }
  });
}

enum { SILU, GELU_TANH };

template <class T>
static void activate(
    int which, const typename T::Element* x, int64_t stride, typename T::Element* y, int64_t rows, int64_t dim, bool gated
) {
  auto silu = [](Floats v) { return v * sigmoid(v); };
  auto gelu_tanh = [](Floats v) {
    return 0.5f * v * (1.0f + tanh(0.797884561f * fma(0.044715f * v * v, v, v)));
  };
  if (which == SILU) activate<T>(x, stride, y, rows, dim, gated, silu);
  else activate<T>(x, stride, y, rows, dim, gated, gelu_tanh);
}

}  // namespace hibachi

using namespace hibachi;

extern "C" {

void hibachi_rms_norm_f32(const float* x, int64_t stride, const float* w, float* y, int64_t rows, int64_t dim, float eps) {
  rms_norm<F32>(x, stride, w, y, rows, dim, eps);
}

void hibachi_rms_norm_bf16(const uint16_t* x, int64_t stride, const uint16_t* w, uint16_t* y, int64_t rows, int64_t dim, float eps) {
  rms_norm<Bf16>(x, stride, w, y, rows, dim, eps);
}

void hibachi_rope_f32(const float* x, int64_t stride, const float* cos, const float* sin, float* y, int64_t tokens, int64_t heads, int64_t dim) {
  rope<F32>(x, stride, cos, sin, y, tokens, heads, dim);
}

void hibachi_rope_bf16(const uint16_t* x, int64_t stride, const uint16_t* cos, const uint16_t* sin, uint16_t* y, int64_t tokens, int64_t heads, int64_t dim) {
  rope<Bf16>(x, stride, cos, sin, y, tokens, heads, dim);
}

void hibachi_activate_f32(int which, const float* x, int64_t stride, float* y, int64_t rows, int64_t dim, int gated) {
  activate<F32>(which, x, stride, y, rows, dim, gated);
}

void hibachi_activate_bf16(int which, const uint16_t* x, int64_t stride, uint16_t* y, int64_t rows, int64_t dim, int gated) {
  activate<Bf16>(which, x, stride, y, rows, dim, gated);
}
}
