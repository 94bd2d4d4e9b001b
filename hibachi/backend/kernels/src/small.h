// What is done with each token between the products.

#pragma once

#include "lanes.h"

namespace hibachi {

// Elements that are worth waking another thread for: of what is read and written once, and of what takes an exp.
constexpr int64_t LIGHT = 32768, HEAVY = 8192;

// How many parts of `each` elements are taken at once.
inline int64_t worth(int64_t elements, int64_t each) {
  return std::max<int64_t>(1, elements / std::max<int64_t>(1, each));
}

// A matrix whose rows may hold several pieces that are treated alike, such as the heads of a token.
template <class E>
struct Pieces {
  E* data;
  int64_t stride, groups, width;  // elements from row to row; pieces of a row, and the elements of each

  E* operator()(int64_t i) const { return data + i / groups * stride + i % groups * width; }
};

// y = x / sqrt(mean(x^2) + eps) * w, plus `added` after rounding. Sums of squares of 16 lanes each, then of the lanes.
template <class T>
struct RmsNorm {
  using Element = typename T::Element;

  Pieces<const Element> x;
  const Element* w;
  Pieces<Element> y;
  int64_t rows, dim;
  float eps;
  const Element* added = nullptr;
  int64_t added_stride = 0;

  int64_t count() const { return rows * x.groups; }
  int64_t batch(int) const { return worth(LIGHT, dim); }

  void operator()(int64_t i) const {
    const Element *from = x(i), *more = added + i * added_stride;
    Element* to = y(i);
    Floats squares = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      Floats v = read_some<T>(from + d, dim - d);
      squares = fma(v, v, squares);
    }
    Floats by = all(1.0f / std::sqrt(sum(squares) / dim + eps));
    for (int64_t d = 0; d < dim; d += LANES) {
      int n = std::min<int64_t>(LANES, dim - d);
      Floats v = read_some<T>(from + d, n) * by * read_some<T>(w + d, n);
      if (added) v = T::rounded(v) + read_some<T>(more + d, n);
      write_some<T>(to + d, v, n);
    }
  }
};

// y = (x - mean) / sqrt(variance + eps) * w + b, plus `added` after rounding. Sums are formed as in RmsNorm.
template <class T>
struct LayerNorm {
  using Element = typename T::Element;

  Pieces<const Element> x;
  const Element *w, *b;  // b: or nullptr
  Pieces<Element> y;
  int64_t rows, dim;
  float eps;
  const Element* added = nullptr;
  int64_t added_stride = 0;

  int64_t count() const { return rows * x.groups; }
  int64_t batch(int) const { return worth(LIGHT, dim); }

  void operator()(int64_t i) const {
    const Element *from = x(i), *more = added + i * added_stride;
    Element* to = y(i);
    Floats sums = {}, squares = {};
    for (int64_t d = 0; d < dim; d += LANES) sums += read_some<T>(from + d, dim - d);
    const Floats mean = all(sum(sums) / dim);
    for (int64_t d = 0; d < dim; d += LANES) {
      const Floats v = only(read_some<T>(from + d, dim - d) - mean, dim - d, 0.0f);
      squares = fma(v, v, squares);
    }
    Floats by = all(1.0f / std::sqrt(sum(squares) / dim + eps));
    for (int64_t d = 0; d < dim; d += LANES) {
      int n = std::min<int64_t>(LANES, dim - d);
      Floats v = (read_some<T>(from + d, n) - mean) * by * read_some<T>(w + d, n);
      if (b) v += read_some<T>(b + d, n);
      if (added) v = T::rounded(v) + read_some<T>(more + d, n);
      write_some<T>(to + d, v, n);
    }
  }
};

// Rotary position embedding of `heads` pieces of a row, each of the first 2 * half elements; y may be x.
template <class T>
struct Rope {
  using Element = typename T::Element;

  Pieces<const Element> x;
  const Element *cos, *sin;  // [tokens, half]
  Pieces<Element> y;
  int64_t tokens, half;

  int64_t count() const { return tokens; }
  int64_t batch(int) const { return worth(LIGHT, x.groups * half * 2); }

  void operator()(int64_t t) const {
    for (int64_t h = 0; h < x.groups; h++) {
      const Element* from = x(t * x.groups + h);
      Element* to = y(t * x.groups + h);
      for (int64_t d = 0; d < half; d += LANES) {
        int n = std::min<int64_t>(LANES, half - d);
        Floats a = read_some<T>(from + d, n), b = read_some<T>(from + half + d, n);
        Floats c = read_some<T>(cos + t * half + d, n), s = read_some<T>(sin + t * half + d, n);
        write_some<T>(to + d, fma(a, c, -(b * s)), n);
        write_some<T>(to + half + d, fma(b, c, a * s), n);
      }
    }
  }
};

// The largest of each row of x, NaN if there is one, and its place, the first one among equals.
struct Best {
  const float* x;
  int64_t rows, columns;
  int32_t* place;
  float* most;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return 1; }

  void operator()(int64_t i) const {
    const float* from = x + i * columns;
    const float low = -std::numeric_limits<float>::infinity();
    const Ints lane = numbers();
    Floats high = all(low);
    Ints at = lane, wrong = {};
    int64_t d = 0;
    for (; d + LANES <= columns; d += LANES) {
      Floats v = load<Floats>(from + d);
      Ints more = v > high;
      high = choose(more, v, high);
      at = choose(more, lane + (int32_t)d, at);
      wrong |= v != v;
    }
    int32_t first = 0;
    float top = low;
    bool nan = false;
    for (int l = 0; l < LANES; l++) {
      nan |= wrong[l] != 0;
      if (high[l] > top || (high[l] == top && at[l] < first)) top = high[l], first = at[l];
    }
    for (; d < columns; d++) {
      nan |= from[d] != from[d];
      if (from[d] > top) top = from[d], first = d;
    }
    place[i] = first;
    most[i] = nan ? std::numeric_limits<float>::quiet_NaN() : top;
  }
};

enum Activation { SILU, GELU_TANH, GELU };

FAST Floats activate(Activation which, Floats v) {
  if (which == SILU) return v * sigmoid(v);
  if (which == GELU) return v * normal(v);
  return 0.5f * v * (1.0f + tanh(0.797884561f * fma(0.044715f * v * v, v, v)));
}

// y [rows, dim] = act(x) * the `dim` numbers after it, or act(x) alone.
template <class T>
struct Activate {
  using Element = typename T::Element;

  Activation which;
  bool gated;
  const Element* x;
  int64_t x_stride;
  Element* y;
  int64_t y_stride, rows, dim;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return worth(HEAVY, dim); }

  void operator()(int64_t i) const {
    const Element* from = x + i * x_stride;
    for (int64_t d = 0; d < dim; d += LANES) {
      int n = std::min<int64_t>(LANES, dim - d);
      Floats a = activate(which, read_some<T>(from + d, n));
      if (gated) a = a * read_some<T>(from + dim + d, n);
      write_some<T>(y + i * y_stride + d, a, n);
    }
  }
};

}  // namespace hibachi
