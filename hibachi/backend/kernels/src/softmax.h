// Softmax: a function of whole rows.

#pragma once

#include "lanes.h"
#include "memory.h"

namespace hibachi {

// y = exp(x - max(x)) / its sum, of rows that lie one after another. A NaN makes the whole row NaN.
template <class T>
struct Softmax {
  using Element = typename T::Element;

  const Element* x;
  Element* y;
  int64_t rows, dim;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, dim)); }

  int64_t scratch() const { return up(dim, LANES) * LANES * sizeof(float); }

  void operator()(int64_t i, char* scratch) const {
    const float none = -std::numeric_limits<float>::infinity();
    const Element* from = x + i * dim;
    float* weights = reinterpret_cast<float*>(scratch);
    Floats high = all(none), total = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      const int n = std::min<int64_t>(LANES, dim - d);
      high = larger(only(read_some<T>(from + d, n), n, none), high);
    }
    const float most = largest(high);
    for (int64_t d = 0; d < dim; d += LANES) {
      const int n = std::min<int64_t>(LANES, dim - d);
      Floats e = only(exp(read_some<T>(from + d, n) - most), n, 0.0f);
      store(weights + d, e);
      total += e;
    }
    const float sums = sum(total);
    for (int64_t d = 0; d < dim; d += LANES)
      write_some<T>(y + i * dim + d, load<Floats>(weights + d) / sums, std::min<int64_t>(LANES, dim - d));
  }
};

}  // namespace hibachi
