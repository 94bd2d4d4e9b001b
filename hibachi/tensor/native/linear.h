// y = x W^T + b with weights that are packed once.
//
// W [n, k] is stored in panels of 48 rows: [n / 48][k / DEPTH][48] lanes, the last panel filled up with zeros. A tile
// of the product is up to 8 rows of x times one panel; its 24 vectors of sums stay in registers while k passes by. So
// each sum is formed in the order of k, whatever the number of rows, and panels are what threads share.

#pragma once

#include "lanes.h"

namespace hibachi {

constexpr int COLUMNS = 3;  // vectors of 16 in a panel
constexpr int WIDTH = COLUMNS * LANES;
constexpr int ROWS = REGISTERS / COLUMNS;

template <class T, int N>
static void multiply(
    const typename T::Lane* x, int64_t stride, const typename T::Lane* panel, int64_t depth, Floats (&out)[N][COLUMNS]
) {
  Floats sums[N][COLUMNS] = {};  // apart from `out`, so that they stay in registers
  for (int64_t k = 0; k < depth; k++, panel += WIDTH) {
    Words w[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) w[c] = load<Words>(panel + c * LANES);
    for (int r = 0; r < N; r++)
      for (int c = 0; c < COLUMNS; c++) sums[r][c] = T::multiply(sums[r][c], w[c], x[r * stride + k]);
  }
  for (int r = 0; r < N; r++)
    for (int c = 0; c < COLUMNS; c++) out[r][c] = sums[r][c];
}

// y [m, n] = x [m, k] W^T + bias, rounded to Out; then, in T's dtype, times `scale` and plus `added`, each rounded.
template <class T, class Out>
struct Linear {
  using Element = typename T::Element;
  using Lane = typename T::Lane;

  const Element* x;  // rows are whole lanes: k and x_stride are multiples of DEPTH
  int64_t x_stride;  // elements from row to row, as are the others
  const Lane* w;
  const Element* bias;  // or nullptr
  typename Out::Element* y;
  int64_t y_stride, m, n, k;
  float scale = 1.0f;
  const Element* added = nullptr;
  int64_t added_stride = 0;

  int64_t count() const { return (n + WIDTH - 1) / WIDTH; }
  int64_t batch(int threads) const { return std::max<int64_t>(1, count() / (8 * threads)); }

  void operator()(int64_t p) const {
    const int64_t depth = k / T::DEPTH, stride = x_stride / T::DEPTH, column = p * WIDTH;
    const Lane *panel = w + p * depth * WIDTH, *lanes = reinterpret_cast<const Lane*>(x);
    const int wide = std::min<int64_t>(WIDTH, n - column);
    for (int64_t i = 0; i < m; i += ROWS)
      with_constant<ROWS>(std::min<int64_t>(ROWS, m - i), [&](auto rows) {
        Floats sums[rows][COLUMNS];
        multiply<T, rows>(lanes + i * stride, stride, panel, depth, sums);
        for (int c = 0; c * LANES < wide; c++) {
          const int some = std::min(LANES, wide - c * LANES);
          const int64_t at = column + c * LANES;
          Floats b = bias ? read_some<T>(bias + at, some) : Floats{};
          for (int r = 0; r < rows; r++) {
            Floats v = bias ? sums[r][c] + b : sums[r][c];
            if (scale != 1.0f) v = Out::rounded(v) * scale;
            if (added) v = Out::rounded(v) + read_some<T>(added + (i + r) * added_stride + at, some);
            write_some<Out>(y + (i + r) * y_stride + at, v, some);
          }
        }
      });
  }
};

// W [n, k] to panels.
template <class T>
struct Pack {
  using Element = typename T::Element;

  const Element* w;
  Element* packed;
  int64_t n, k;

  int64_t count() const { return (n + WIDTH - 1) / WIDTH; }
  int64_t batch(int) const { return 1; }

  void operator()(int64_t p) const {
    constexpr int D = T::DEPTH;
    const int64_t depth = (k + D - 1) / D;
    Element* to = packed + p * depth * WIDTH * D;
    std::fill_n(to, depth * WIDTH * D, Element{});
    for (int64_t c = 0; c < std::min<int64_t>(WIDTH, n - p * WIDTH); c++)
      for (int64_t i = 0; i < k; i++) to[(i / D * WIDTH + c) * D + i % D] = w[(p * WIDTH + c) * k + i];
  }
};

// Rows `at` of W, from its panels: out [many, k].
template <class T>
struct Rows {
  using Element = typename T::Element;

  const Element* packed;
  const int32_t* at;
  Element* out;
  int64_t many, k;

  int64_t count() const { return many; }
  int64_t batch(int) const { return 4; }

  void operator()(int64_t i) const {
    constexpr int D = T::DEPTH;
    const int64_t depth = (k + D - 1) / D;
    const Element* from = packed + (at[i] / WIDTH * depth * WIDTH + at[i] % WIDTH) * D;
    for (int64_t j = 0; j < k; j++) out[i * k + j] = from[j / D * WIDTH * D + j % D];
  }
};

}  // namespace hibachi
