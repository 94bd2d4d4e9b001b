// Tokens from logits: a function of whole rows.
//
// Filters leave the most likely tokens. Which is the last one that they keep is found without sorting a row: numbers
// >= 0 are in the order of their bits, so passes over these bits narrow it down, eleven of them at a time. Before that
// come cheap bounds, so that few numbers are looked at: those below (1 - top_p) / columns of the mass cannot be kept by
// top_p, and the k-th largest of all is no smaller than the k-th largest of the maxima of groups.

#pragma once

#include "lanes.h"
#include "memory.h"
#include "small.h"

namespace hibachi {

constexpr int BINS = 2048;
constexpr int64_t BLOCK = 512;  // numbers that are added up by themselves

// The smallest key of those n numbers that are kept: of the largest keys, as few as have a mass of at least `share`,
// and all with the same key as the last. 0 if all together have less. key_of(number) >= 0, mass_of(number) >= 0.
template <class K, class F>
static float threshold(const float* numbers, int64_t n, double share, const K& key_of, const F& mass_of) {
  double masses[BINS], above = 0;  // above: of the keys that are larger than all that can still be it
  uint32_t prefix = 0;             // what is known of the key's bits, and below which of them it is not
  for (int known = 31; known > 0;) {
    const int bits = std::min(11, known), low = known - bits;
    std::fill_n(masses, int64_t(1) << bits, 0.0);
    for (int64_t i = 0; i < n; i++) {
      const float key = key_of(numbers[i]);
      uint32_t b;
      std::memcpy(&b, &key, sizeof b);
      if (known == 31 || b >> known == prefix) masses[b >> low & ((1u << bits) - 1)] += mass_of(numbers[i]);
    }
    int64_t bin = (int64_t(1) << bits) - 1;
    for (; bin > 0 && above + masses[bin] < share; bin--) above += masses[bin];
    prefix = prefix << bits | uint32_t(bin);
    known = low;
  }
  float found;
  std::memcpy(&found, &prefix, sizeof found);
  return found;
}

// Those of n numbers that are at least `least`, in their order; returns how many.
static int64_t select(const float* values, int64_t n, float least, float* out) {
  int64_t m = 0;
  for (int64_t i = 0; i < n; i += LANES) {
    const int some = std::min<int64_t>(LANES, n - i);
    float group[LANES] = {};
    std::memcpy(group, values + i, some * sizeof(float));
    if (largest(load<Floats>(group)) < least) continue;
    for (int l = 0; l < some; l++)
      if (group[l] >= least) out[m++] = group[l];
  }
  return m;
}

// The sum of n numbers: sixteen lanes, block by block.
static double sum_of(const float* values, int64_t n) {
  double all = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    Floats sums = {};
    const int64_t end = std::min(n, at + BLOCK);
    for (int64_t i = at; i < end; i += LANES) sums += read_some<F32>(values + i, std::min<int64_t>(LANES, end - i));
    all += sum(sums);
  }
  return all;
}

// The largest of each row, and the sum of e^(x - largest): [rows] both.
struct Mass {
  const float* x;
  int64_t rows, columns;
  float *most, *mass;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return 1; }
  int64_t scratch() const { return up(columns, LANES) * LANES * sizeof(float); }

  void operator()(int64_t i, char* scratch) const {
    int32_t place;
    Best{x + i * columns, 1, columns, &place, most + i}(0);
    float* weights = reinterpret_cast<float*>(scratch);
    weigh(x + i * columns, columns, most[i], 1.0f, weights);
    mass[i] = float(sum_of(weights, columns));
  }

  // e^((x - most) / temperature).
  static void weigh(const float* x, int64_t n, float most, float temperature, float* weights) {
    for (int64_t i = 0; i < n; i += LANES) {
      const int some = std::min<int64_t>(LANES, n - i);
      write_some<F32>(weights + i, exp((read_some<F32>(x + i, some) - most) / temperature), some);
    }
  }
};

// As `How` in hibachi/decode/sampling.py, arrays [rows].
struct How {
  const float *temperature, *top_p, *min_p, *typical_p, *u;
  const int32_t* top_k;
};

// A token of each row; most: its largest logit, NaN if there is one in the row.
struct Draw {
  const float* x;
  int64_t rows, columns;
  How how;
  int32_t* token;
  float* most;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return 1; }
  int64_t scratch() const { return 2 * up(columns, LANES) * LANES * sizeof(float); }

  void operator()(int64_t i, char* scratch) const {
    const float* from = x + i * columns;
    Best{from, 1, columns, token + i, most + i}(0);
    const float inf = std::numeric_limits<float>::infinity();
    if (!(how.temperature[i] > 0) || !(most[i] > -inf && most[i] < inf)) return;
    float* weights = reinterpret_cast<float*>(scratch);
    float* some = weights + up(columns, LANES) * LANES;
    Mass::weigh(from, columns, most[i], std::max(how.temperature[i], 1e-30f), weights);
    float least = std::max(how.min_p[i], 0.0f);
    if (how.top_k[i] > 0 && how.top_k[i] < columns) least = std::max(least, kth(weights, how.top_k[i], some));
    if (how.top_p[i] < 1) least = std::max(least, pth(weights, least, how.top_p[i], some));
    if (least > 0) drop(weights, [&](Floats w) { return w >= least ? w : Floats{}; });
    if (how.typical_p[i] < 1) typical(weights, how.typical_p[i], some);
    token[i] = invert(weights, how.u[i], token[i]);
  }

 private:
  template <class F>
  void drop(float* weights, const F& kept) const {
    for (int64_t i = 0; i < columns; i += LANES) {
      const int n = std::min<int64_t>(LANES, columns - i);
      write_some<F32>(weights + i, kept(read_some<F32>(weights + i, n)), n);
    }
  }

  static constexpr auto ONE = [](float) { return 1.0; };
  static constexpr auto ITSELF = [](float w) { return w; };

  // The k-th largest.
  float kth(const float* weights, int32_t k, float* some) const {
    float bound = 0;
    const int64_t groups = columns / LANES;
    if (groups >= 4 * int64_t(k)) {
      for (int64_t g = 0; g < groups; g++) some[g] = largest(load<Floats>(weights + g * LANES));
      bound = threshold(some, groups, k, ITSELF, ONE);
    }
    return threshold(some, select(weights, columns, bound, some), k, ITSELF, ONE);
  }

  // The last of those that top_p keeps, of the weights from `least` on.
  float pth(const float* weights, float least, float top_p, float* some) const {
    double whole;
    int64_t n;
    if (least > 0) {
      n = select(weights, columns, least, some);
      whole = sum_of(some, n);
    } else {
      whole = sum_of(weights, columns);
      n = select(weights, columns, float((1 - double(top_p)) * whole / columns * 0.999), some);
    }
    return threshold(some, n, double(top_p) * whole, ITSELF, ITSELF);
  }

  // Leaves those whose information is nearest to the entropy, until they have a share of typical_p.
  void typical(float* weights, float typical_p, float* some) const {
    const double whole = sum_of(weights, columns);
    double entropy = 0;
    for (int64_t i = 0; i < columns; i++)
      if (weights[i] > 0) entropy -= weights[i] / whole * log_of(weights[i] / whole);
    // Nearness, so that the largest are kept: numbers >= 0 that fall as |information - entropy| grows.
    const auto nearness = [&](float w) {
      const double far = -log_of(w / whole) - entropy;
      return w > 0 ? float(1 / (1 + (far < 0 ? -far : far))) : 0.0f;
    };
    int64_t n = 0;
    for (int64_t i = 0; i < columns; i++)
      if (weights[i] > 0) some[n++] = weights[i];
    const float limit = threshold(some, n, double(typical_p) * whole, nearness, ITSELF);
    for (int64_t i = 0; i < columns; i++)
      if (weights[i] > 0 && nearness(weights[i]) < limit) weights[i] = 0;
  }

  // The natural logarithm of x > 0, the same everywhere: by atanh of a number near 1, relative error below 1e-11.
  static double log_of(double x) {
    uint64_t b;
    std::memcpy(&b, &x, sizeof b);
    int64_t e = int64_t(b >> 52 & 0x7ff) - 1023;
    b = (b & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    std::memcpy(&m, &b, sizeof m);
    if (m > 1.4142135623730951) m *= 0.5, e++;
    const double z = (m - 1) / (m + 1), z2 = z * z;
    double series = 0;
    for (int k = 15; k >= 1; k -= 2) series = series * z2 + 1.0 / k;
    return 2 * z * series + e * 0.69314718055994531;
  }

  // Where the sums of the weights first exceed a share u of the whole. It has a weight > 0, whatever is rounded.
  int32_t invert(const float* weights, float u, int32_t otherwise) const {
    const double share = double(u) * sum_of(weights, columns);
    double before = 0, sum = 0;  // sum: before the block that it is in
    int64_t in = -1;
    for (int64_t at = 0; at < columns && before <= share; at += BLOCK) {
      const double block = sum_of(weights + at, std::min(BLOCK, columns - at));
      if (block > 0) in = at, sum = before;
      before += block;
    }
    int32_t last = otherwise;
    for (int64_t i = in; in >= 0 && i < std::min(in + BLOCK, columns) && sum <= share; i++)
      if (weights[i] > 0) last = int32_t(i), sum += weights[i];
    return last;
  }
};

}  // namespace hibachi
