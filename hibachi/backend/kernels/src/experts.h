// A mixture of experts (Shazeer et al. 2017): each token goes through a few of many feed-forward parts.
//
// The tokens are sorted by expert, so that an expert multiplies all of its rows at once, and nothing that no token
// chose is read. What comes of a token does not depend on which others chose the same.

#pragma once

#include <bit>

#include "small.h"
#include "softmax.h"

namespace hibachi {

// Who goes where. A token with each of its experts is a pair; pairs are sorted by expert. Owned by whoever made the
// memory, `Lists::bytes`.
struct Lists {
  int64_t tokens, each, experts;
  float* weights;   // [tokens, each]: what an expert counts
  int32_t* chosen;  // [tokens, each]
  int32_t* pairs;   // [tokens * each]: the pair at each place of the order
  int32_t* places;  // [tokens, each]: where each pair went
  int32_t* starts;  // [experts + 1]: the pairs of expert e are at starts[e] to starts[e + 1] - 1

  static int64_t bytes(int64_t tokens, int64_t each, int64_t experts) {
    return (4 * tokens * each + experts + 1) * sizeof(int32_t);
  }

  Lists(void* memory, int64_t tokens, int64_t each, int64_t experts) : tokens(tokens), each(each), experts(experts) {
    weights = static_cast<float*>(memory);
    chosen = reinterpret_cast<int32_t*>(weights + tokens * each);
    pairs = chosen + tokens * each;
    places = pairs + tokens * each;
    starts = places + tokens * each;
  }
};

// The experts of each token: the `each` largest of softmax(x), of equals the first, and how much each counts.
template <class T>
struct Route {
  const typename T::Element* x;  // [tokens, experts]
  int64_t x_stride;
  int64_t tokens, each, experts;
  bool normalised;  // the weights of a token sum up to 1
  float* weights;
  int32_t* chosen;

  int64_t count() const { return tokens; }
  int64_t batch(int) const { return worth(HEAVY, experts); }
  int64_t scratch() const { return 2 * up(experts, LANES) * sizeof(Floats); }

  void operator()(int64_t i, char* scratch) const {
    float *wide = reinterpret_cast<float*>(scratch), *odds = wide + up(experts, LANES) * LANES;
    for (int64_t e = 0; e < experts; e += LANES)
      store(wide + e, read_some<T>(x + i * x_stride + e, std::min<int64_t>(LANES, experts - e)));
    Softmax<F32>{wide, odds, 1, experts}(0, reinterpret_cast<char*>(odds));
    float total = 0.0f;
    for (int64_t j = 0; j < each; j++) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; e++) {
        const bool free = std::find(chosen + i * each, chosen + i * each + j, e) == chosen + i * each + j;
        if (free && (best < 0 || odds[e] > odds[best])) best = e;
      }
      chosen[i * each + j] = best;
      weights[i * each + j] = odds[best];
      total += odds[best];
    }
    for (int64_t j = 0; normalised && j < each; j++) weights[i * each + j] /= total;
  }
};

// Sorts the pairs: one part, as it takes no time.
struct Sort {
  Lists lists;

  int64_t count() const { return 1; }
  int64_t batch(int) const { return 1; }

  void operator()(int64_t) const {
    const int64_t pairs = lists.tokens * lists.each;
    std::fill_n(lists.starts, lists.experts + 1, 0);
    for (int64_t i = 0; i < pairs; i++) lists.starts[lists.chosen[i] + 1]++;
    for (int64_t e = 0; e < lists.experts; e++) lists.starts[e + 1] += lists.starts[e];
    for (int64_t i = 0; i < pairs; i++) {
      const int32_t at = lists.starts[lists.chosen[i]]++;  // moves to where the next expert starts
      lists.pairs[at] = i, lists.places[i] = at;
    }
    for (int64_t e = lists.experts; e > 0; e--) lists.starts[e] = lists.starts[e - 1];
    lists.starts[0] = 0;
  }
};

// The rows of x in the order of the pairs: y [pairs, dim].
template <class E>
struct Gather {
  Lists lists;
  const E* x;
  int64_t x_stride;
  E* y;
  int64_t dim;

  int64_t count() const { return lists.tokens * lists.each; }
  int64_t batch(int) const { return 16; }
  void operator()(int64_t i) const { std::copy_n(x + lists.pairs[i] / lists.each * x_stride, dim, y + i * dim); }
};

// Each expert's product of its rows. L: a product of all rows, with anybody's weights.
template <class L>
struct OfExperts {
  Lists lists;
  L product;
  const void* const* w;
  const float* const* scales;  // of bytes, or nullptr

  int64_t count() const { return lists.experts * product.panels(); }
  int64_t batch(int threads) const {
    L mean = product;
    mean.m = std::max<int64_t>(1, product.m / lists.experts);
    return mean.batch(threads);
  }
  void operator()(int64_t i) const {
    const int64_t e = i / product.panels(), begin = lists.starts[e], many = lists.starts[e + 1] - begin;
    if (many) product.of(begin, many, w[e], scales ? scales[e] : nullptr).part(i % product.panels(), 0, many);
  }
};

// y [tokens, dim] = the sum of what a token's experts gave, each as much as it counts, in the order in which they were
// chosen; then times `scale` and plus `added`, each rounded.
template <class T>
struct Mix {
  using Element = typename T::Element;

  Lists lists;
  const Element* x;  // [pairs, dim]
  Element* y;
  int64_t y_stride, dim;
  float scale = 1.0f;
  const Element* added = nullptr;
  int64_t added_stride = 0;

  int64_t count() const { return lists.tokens; }
  int64_t batch(int) const { return worth(LIGHT, dim * lists.each); }

  void operator()(int64_t i) const {
    for (int64_t d = 0; d < dim; d += LANES) {
      const int n = std::min<int64_t>(LANES, dim - d);
      Floats v = {};
      for (int64_t j = i * lists.each; j < (i + 1) * lists.each; j++)
        v = fma(read_some<T>(x + lists.places[j] * dim + d, n), T::rounded(all(lists.weights[j])), v);
      if (scale != 1.0f) v = T::rounded(v) * scale;
      if (added) v = T::rounded(v) + read_some<T>(added + i * added_stride + d, n);
      write_some<T>(y + i * y_stride + d, v, n);
    }
  }
};

// The same of one leaf (linear.h), in float32: it is added to the leaves before it as a part of their tree. In the end
// the sum of all is in the first of `sums`.
struct MixLeaf {
  Lists lists;
  const float* x;  // [pairs, dim]
  float* sums;     // [depth(leaves), tokens, dim]: those that wait for their neighbours
  int64_t dim, leaf, leaves;

  static int64_t depth(int64_t leaves) { return std::bit_width(uint64_t(leaves)); }

  int64_t count() const { return lists.tokens; }
  int64_t batch(int) const { return worth(LIGHT, dim * lists.each); }

  void operator()(int64_t i) const {
    const int waiting = std::popcount(uint64_t(leaf));
    const int to = leaf + 1 == leaves ? 0 : waiting - std::countr_one(uint64_t(leaf));
    for (int64_t d = 0; d < dim; d += LANES) {
      const int n = std::min<int64_t>(LANES, dim - d);
      const auto sum = [&](int which) { return sums + (which * lists.tokens + i) * dim + d; };
      Floats v = {};
      for (int64_t j = i * lists.each; j < (i + 1) * lists.each; j++)
        v = fma(read_some<F32>(x + lists.places[j] * dim + d, n), all(lists.weights[j]), v);
      for (int left = waiting; left > to; left--) v += read_some<F32>(sum(left - 1), n);
      write_some<F32>(sum(to), v, n);
    }
  }
};

}  // namespace hibachi
