// Layers that keep a state instead of keys and values, as Mamba's (Gu & Dao 2023): a convolution over the last few
// tokens of each channel, and a scan over time. Rows have equally many tokens. No channel depends on another one, so
// vectors hold channels, and time goes by in its order.

#pragma once

#include "small.h"

namespace hibachi {

// y = silu(sum over i of w_i * the input i - (width - 1) tokens ago, plus b). Before the first token lies `past`.
template <class T>
struct Convolve {
  using Element = typename T::Element;

  const Element* past;   // [rows, width - 1, dim]
  const Element* x;      // [rows, tokens, dim]
  int64_t x_stride;      // elements from token to token
  const Element *w, *b;  // [width, dim]; [dim] or nullptr
  Element* y;            // [rows, tokens, dim]
  Element* last;         // [rows, width - 1, dim]: what is past for the next token
  int64_t rows, tokens, dim, width;

  int64_t count() const { return rows * tokens; }
  int64_t batch(int) const { return worth(HEAVY, dim); }

  // The input of token t of a row; below 0: of what came before.
  const Element* at(int64_t row, int64_t t) const {
    return t < 0 ? past + (row * (width - 1) + width - 1 + t) * dim : x + (row * tokens + t) * x_stride;
  }

  void operator()(int64_t i) const {
    const int64_t row = i / tokens, t = i % tokens, first = t - (width - 1);
    for (int64_t d = 0; d < dim; d += LANES) {
      const int n = std::min<int64_t>(LANES, dim - d);
      Floats sums = {};
      for (int64_t j = 0; j < width; j++)
        sums = fma(read_some<T>(at(row, first + j) + d, n), read_some<T>(w + j * dim + d, n), sums);
      if (b) sums += read_some<T>(b + d, n);
      write_some<T>(y + i * dim + d, activate(SILU, sums), n);
    }
    if (t == tokens - 1)
      for (int64_t j = 0; j < width - 1; j++)
        std::copy_n(at(row, first + 1 + j), dim, last + (row * (width - 1) + j) * dim);
  }
};

// e^x, as far as it goes. Rates are negative, if a model is sane.
FAST Floats decayed(Floats x) { return exp(choose(x > 88.0f, all(88.0f), x)); }

// For each token: step = softplus(dt); state = state * e^(step * decay) + step * x * in; y = (sum over the state of
// state * out, plus x * skip) * silu(gate). Of one row, sixteen channels a part.
template <class T>
struct Scan {
  using Element = typename T::Element;

  const float* state;                       // [rows, size, dim]
  const Element *dt, *x, *gate, *in, *out;  // [rows, tokens, dim] the first three, [rows, tokens, size] the others
  int64_t dt_stride, x_stride, gate_stride, in_stride, out_stride;  // elements from token to token
  const float *decay, *skip;                                        // [size, dim], [dim]
  Element* y;                                                       // [rows, tokens, dim]
  float* last;                                                      // [rows, size, dim]: the state after the last token
  int64_t rows, tokens, dim, size;

  int64_t chunks() const { return up(dim, LANES); }
  int64_t count() const { return rows * chunks(); }
  int64_t batch(int) const { return worth(HEAVY, tokens * size * LANES); }
  int64_t scratch() const { return 2 * up(size, LANES) * sizeof(Floats); }

  void operator()(int64_t i, char* scratch) const {
    const int64_t row = i / chunks(), d = i % chunks() * LANES;
    const int n = std::min<int64_t>(LANES, dim - d);
    float *write = reinterpret_cast<float*>(scratch), *read = write + up(size, LANES) * LANES;
    float* kept = last + row * size * dim + d;
    for (int64_t j = 0; j < size; j++)
      std::memmove(kept + j * dim, state + (row * size + j) * dim + d, n * sizeof(float));
    const Floats more = read_some<F32>(skip + d, n);
    for (int64_t t = row * tokens; t < (row + 1) * tokens; t++) {
      for (int64_t j = 0; j < size; j += LANES) {
        const int some = std::min<int64_t>(LANES, size - j);
        store(write + j, read_some<T>(in + t * in_stride + j, some));
        store(read + j, read_some<T>(out + t * out_stride + j, some));
      }
      const Floats step = softplus(read_some<T>(dt + t * dt_stride + d, n)), v = read_some<T>(x + t * x_stride + d, n);
      const Floats added = step * v;
      Floats sums = {};
      for (int64_t j = 0; j < size; j++) {
        Floats s = read_some<F32>(kept + j * dim, n), rate = read_some<F32>(decay + j * dim + d, n);
        s = fma(added, all(write[j]), s * decayed(step * rate));
        write_some<F32>(kept + j * dim, s, n);
        sums = fma(s, all(read[j]), sums);
      }
      sums = fma(v, more, sums) * activate(SILU, read_some<T>(gate + t * gate_stride + d, n));
      write_some<T>(y + t * dim + d, sums, n);
    }
  }
};

}  // namespace hibachi
