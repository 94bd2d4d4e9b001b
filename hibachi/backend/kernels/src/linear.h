// y = x W^T + b with weights that are packed once, by pack.h.
//
// W [n, k] is stored in panels of 48 rows: [n / 48][k / DEPTH][48] lanes, the last panel filled up with zeros. A tile
// of the product is a few rows of x times one panel, or a third of one: its sums stay in registers while k passes by.
// So each sum is formed in the order of k, whatever the number of rows, and panels are what threads share.
//
// A product may be cut into leaves: each is the sum over as many columns of W, and leaves are added as a binary tree of
// neighbours. So several processes that have some leaves each can come to the bits of one.

#pragma once

#include "lanes.h"
#include "memory.h"

namespace hibachi {

constexpr int COLUMNS = 3;  // vectors of 16 in a panel
constexpr int WIDTH = COLUMNS * LANES;
constexpr int64_t SOME = 256;  // rows of a part

// So many steps of k before a panel is needed, memory is asked for it, also for the next one; 0: it is not asked; NEXT:
// each time that rows pass over a panel, for a part of the next one. What is best depends on the processor and on the
// rows of a product, and is measured (trial.py).
constexpr int DISTANCES = 4;  // of products of at most 2, 8, 16 rows, and of more
constexpr int64_t NEXT = -1, USUAL = 40;
inline int64_t distances[DISTANCES] = {10, USUAL, USUAL, NEXT};
inline int64_t distance(int64_t rows) { return distances[rows <= 2 ? 0 : rows <= 8 ? 1 : rows <= 16 ? 2 : 3]; }

// A distance, and which pass over a panel this is, of how many.
struct Ahead {
  int64_t distance, pass, passes;

  int64_t steps() const { return distance == NEXT ? USUAL : distance; }
};

// Asks memory for a piece of a panel that is multiplied with N rows. Few rows need it once: it should not push others
// out of the caches, such as the host's own data, which a step would wait for.
template <int N>
FAST void ask(const void* p) {
  __builtin_prefetch(p, 0, N <= 2 ? 0 : 3);
}

// Columns `begin` to before `end` of the k that panels have. All are whole lanes, and whole groups of rounded rows.
struct Span {
  int64_t k, begin, end;
};

// What a product is of: rows of x, whole lanes each, and the panels of W.
template <class T>
struct Factors {
  using Lane = typename T::Lane;
  static constexpr int64_t WORTH = 32768;  // products that are worth waking another thread for
  static constexpr int ROWS = PART == LANES                              ? 8
                              : sizeof(typename T::Wide) == sizeof(Part) ? 6
                                                                         : 4;  // that are multiplied at once

  const Lane* x;
  int64_t stride;  // lanes from row to row
  const Lane* w = nullptr;

  // Rows of `stride` elements, which is a multiple of DEPTH. Others than those of floats have m rows that are rounded.
  Factors(const void* rows, int64_t stride, int64_t, int64_t)
      : x(static_cast<const Lane*>(rows)), stride(stride / T::DEPTH) {}

  // The rows from row `begin` on, with other panels and their scales.
  Factors of(int64_t begin, const void* panels, const float*) const {
    Factors found = *this;
    found.x += begin * stride, found.w = static_cast<const Lane*>(panels);
    return found;
  }

  // out = N rows from row i, times a span of panel p.
  template <int N>
  void multiply(int64_t i, int64_t p, Span span, const Ahead& ahead, Floats (&out)[N][COLUMNS]) const {
    constexpr int WIDE = N * COLUMNS * PARTS <= REGISTERS ? COLUMNS : 1;  // vectors whose sums stay in registers
    const int64_t passes = ahead.passes * (COLUMNS / WIDE), each = WIDTH / passes;  // lanes of the next one, in a step
    const int64_t first_lane = span.begin / T::DEPTH, depth = up(span.end - span.begin, T::DEPTH);
    const Lane *rows = x + i * stride + first_lane, *panel = w + (p * up(span.k, T::DEPTH) + first_lane) * WIDTH;
    for (int first = 0; first < COLUMNS; first += WIDE) {
      Part sums[N][WIDE * PARTS] = {};
      products<T>(sums, [&](auto arithmetic) __attribute__((always_inline)) {
        using A = decltype(arithmetic);
        const Lane* at = panel + first * LANES;
        const Lane* next =
            panel + up(span.k, T::DEPTH) * WIDTH + (ahead.pass * (COLUMNS / WIDE) + first) * depth * each;
        for (int64_t d = 0; d < depth; d++, at += WIDTH, next += each) {
          if (ahead.distance == NEXT)
            for (int c = 0; c * LANES < each; c++) ask<N>(next + c * LANES);
          else
            for (int c = 0; ahead.distance && c < WIDE; c++) ask<N>(at + ahead.distance * WIDTH + c * LANES);
          typename T::Wide w[WIDE * PARTS];
          for (int c = 0; c < WIDE * PARTS; c++) w[c] = T::wide(load<PartWords>(at + c * PART));
          for (int r = 0; r < N; r++)
            for (int c = 0; c < WIDE * PARTS; c++) sums[r][c] = A::multiply(sums[r][c], w[c], rows[r * stride + d]);
        }
      });
      for (int r = 0; r < N; r++) std::memcpy(&out[r][first], sums[r], sizeof sums[r]);
    }
  }
};

// y [m, n] = x [m, k] W^T + bias, rounded to Out; then, in T's dtype, times `scale` and plus `added`, each rounded.
// X: Factors, of floats or of another kind.
template <class T, class Out, class X = Factors<T>>
struct Linear {
  using Element = typename T::Element;

  X factors;
  const Element* bias;  // or nullptr
  typename Out::Element* y;
  int64_t y_stride, m, n, k;  // elements from row to row
  float scale = 1.0f;
  const Element* added = nullptr;
  int64_t added_stride = 0;
  int64_t leaves = 1;  // into which k is cut
  int64_t leaf = -1;   // that is computed alone; -1: all, and their sum

  // A part is a panel with some of the rows, which stay in the second cache while panels pass.
  int64_t panels() const { return up(n, WIDTH); }
  int64_t count() const { return panels() * up(m, SOME); }
  int64_t batch(int threads) const {
    const int64_t worth = up(X::WORTH, std::max<int64_t>(1, std::min(m, SOME) * k * WIDTH));
    return std::max<int64_t>(worth, count() / (8 * threads));
  }

  // The product of `many` rows from row `begin` with other panels.
  Linear of(int64_t begin, int64_t many, const void* w, const float* scales) const {
    Linear found = *this;
    found.factors = factors.of(begin, w, scales), found.y += begin * y_stride, found.m = many;
    return found;
  }

  void operator()(int64_t i) const {
    const int64_t begin = i / panels() * SOME;
    part(i % panels(), begin, std::min(m, begin + SOME));
  }

  // Rows `begin` to before `end`, times panel p.
  void part(int64_t p, int64_t begin, int64_t end) const {
    const int64_t column = p * WIDTH, each = k / leaves;
    Ahead ahead{distance(m), 0, up(end - begin, X::ROWS)};
    const Span columns = leaf < 0 ? Span{k, 0, k} : Span{k, leaf * each, (leaf + 1) * each};
    const int wide = std::min<int64_t>(WIDTH, n - column);
    for (int64_t i = begin; i < end; i += X::ROWS, ahead.pass++)
      with_constant<X::ROWS>(std::min<int64_t>(X::ROWS, end - i), [&](auto rows) {
        Floats sums[rows][COLUMNS];
        if (leaves == 1 || leaf >= 0) factors.template multiply<rows>(i, p, columns, ahead, sums);
        else tree<rows>(i, p, ahead, sums);
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

 private:
  static constexpr int DEEPEST = 8;  // so at most 2^8 - 1 leaves

  // The sum of all leaves. As in counting by twos, a leaf is added to its neighbour as soon as that is there.
  template <int N>
  void tree(int64_t i, int64_t p, const Ahead& ahead, Floats (&out)[N][COLUMNS]) const {
    Floats sums[DEEPEST][N][COLUMNS];
    const int64_t each = k / leaves;
    int top = 0;
    const auto join = [&]() __attribute__((always_inline)) {
      top--;
      for (int r = 0; r < N; r++)
        for (int c = 0; c < COLUMNS; c++) sums[top - 1][r][c] += sums[top][r][c];
    };
    for (int64_t leaf = 0; leaf < leaves; leaf++) {
      factors.template multiply<N>(i, p, Span{k, leaf * each, (leaf + 1) * each}, ahead, sums[top++]);
      for (int64_t done = leaf + 1; done % 2 == 0; done /= 2) join();
    }
    while (top > 1) join();
    std::memcpy(out, sums[0], sizeof out);
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
