// y = x W^T + b with weights that are packed once.
//
// W [n, k] is stored in panels of 48 rows: [n / 48][k / DEPTH][48] lanes, the last panel filled up with zeros. A tile
// of the product is up to 8 rows of x times one panel; its 24 vectors of sums stay in registers while k passes by. So
// each sum is formed in the order of k, whatever the number of rows, and panels are what threads share.

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
  int64_t depth = (k + T::DEPTH - 1) / T::DEPTH;
  std::vector<typename T::Element> copy;
  if (k % T::DEPTH || stride % T::DEPTH) {  // rows must be whole lanes
    copy.resize(m * depth * T::DEPTH);
    for (int64_t i = 0; i < m; i++) std::copy_n(x + i * stride, k, copy.data() + i * depth * T::DEPTH);
    x = copy.data();
    stride = depth * T::DEPTH;
  }
  const auto* lanes = reinterpret_cast<const typename T::Lane*>(x);
  int64_t panels = (n + WIDTH - 1) / WIDTH;
  int64_t batch = std::max<int64_t>(1, panels / (8 * at::get_num_threads()));
  share(panels, batch, [&](int64_t p) {
    const auto* panel = w + p * depth * WIDTH;
    int64_t column = p * WIDTH;
    int wide = std::min<int64_t>(WIDTH, n - column);
    for (int64_t i = 0; i < m; i += ROWS)
      with_constant<ROWS>(std::min<int64_t>(ROWS, m - i), [&](auto rows) {
        Floats sums[rows][COLUMNS];
        multiply<T, rows>(lanes + i * (stride / T::DEPTH), stride / T::DEPTH, panel, depth, sums);
        for (int c = 0; c * LANES < wide; c++) {
          int some = std::min(LANES, wide - c * LANES);
          Floats b = bias ? read_some<T>(bias + column + c * LANES, some) : Floats{};
          for (int r = 0; r < rows; r++)
            write_some<Out>(y + (i + r) * n + column + c * LANES, bias ? sums[r][c] + b : sums[r][c], some);
        }
      });
  });
}

template <class T>
static void pack(const typename T::Element* w, typename T::Element* packed, int64_t n, int64_t k) {
  int64_t depth = (k + T::DEPTH - 1) / T::DEPTH, panels = (n + WIDTH - 1) / WIDTH;
  share(panels, 1, [&](int64_t p) {
    auto* to = packed + p * depth * WIDTH * T::DEPTH;
    std::fill_n(to, depth * WIDTH * T::DEPTH, typename T::Element{});
    for (int64_t c = 0; c < std::min<int64_t>(WIDTH, n - p * WIDTH); c++)
      for (int64_t i = 0; i < k; i++)
        to[(i / T::DEPTH * WIDTH + c) * T::DEPTH + i % T::DEPTH] = w[(p * WIDTH + c) * k + i];
  });
}

template <class T>
static void rows(
    const typename T::Element* packed, const int32_t* at, typename T::Element* out, int64_t count, int64_t k
) {
  int64_t depth = (k + T::DEPTH - 1) / T::DEPTH;
  share(count, 4, [&](int64_t i) {
    const auto* from = packed + (at[i] / WIDTH * depth * WIDTH + at[i] % WIDTH) * T::DEPTH;
    for (int64_t j = 0; j < k; j++) out[i * k + j] = from[j / T::DEPTH * WIDTH * T::DEPTH + j % T::DEPTH];
  });
}

}  // namespace hibachi

using namespace hibachi;

extern "C" {

int64_t hibachi_panel() { return WIDTH; }

void hibachi_linear_f32(const float* x, int64_t stride, const float* w, const float* b, float* y, int64_t m, int64_t n, int64_t k) {
  linear<F32, F32>(x, stride, w, b, y, m, n, k);
}

void hibachi_linear_bf16(const uint16_t* x, int64_t stride, const uint32_t* w, const uint16_t* b, uint16_t* y, int64_t m, int64_t n, int64_t k) {
  linear<Bf16, Bf16>(x, stride, w, b, y, m, n, k);
}

void hibachi_linear_bf16_f32(const uint16_t* x, int64_t stride, const uint32_t* w, const uint16_t* b, float* y, int64_t m, int64_t n, int64_t k) {
  linear<Bf16, F32>(x, stride, w, b, y, m, n, k);
}

void hibachi_pack_f32(const float* w, float* packed, int64_t n, int64_t k) { pack<F32>(w, packed, n, k); }
void hibachi_pack_bf16(const uint16_t* w, uint16_t* packed, int64_t n, int64_t k) { pack<Bf16>(w, packed, n, k); }

void hibachi_rows_f32(const float* packed, const int32_t* at, float* out, int64_t count, int64_t k) {
  rows<F32>(packed, at, out, count, k);
}

void hibachi_rows_bf16(const uint16_t* packed, const int32_t* at, uint16_t* out, int64_t count, int64_t k) {
  rows<Bf16>(packed, at, out, count, k);
}
}
