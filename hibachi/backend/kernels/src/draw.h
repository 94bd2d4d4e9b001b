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

// The smallest key of those of n numbers that are kept: of the largest keys, as few as have a mass of at least `share`,
// and all with the same key as the last. 0 if all together have less. Keys and masses are >= 0; nullptr: each has 1.
static float threshold(const float* keys, const float* each, int64_t n, double share) {
  double masses[BINS], above = 0;  // above: of the keys that are larger than all that can still be it
  uint32_t prefix = 0;             // what is known of the key's bits, and below which of them it is not
  for (int known = 31; known > 0;) {
    const int bits = std::min(11, known), low = known - bits;
    std::fill_n(masses, int64_t(1) << bits, 0.0);
    for (int64_t i = 0; i < n; i++) {
      uint32_t b;
      std::memcpy(&b, keys + i, sizeof b);
      if (known == 31 || b >> known == prefix) masses[b >> low & ((1u << bits) - 1)] += each ? each[i] : 1.0f;
    }
    int64_t bin = (int64_t(1) << bits) - 1;
    for (; bin > 0 && (masses[bin] == 0 || above + masses[bin] < share); bin--) above += masses[bin];
    prefix = prefix << bits | uint32_t(bin);
    known = low;
  }
  float found;
  std::memcpy(&found, &prefix, sizeof found);
  return found;
}

// Those of n numbers that are at least `least`, in their order; returns how many. out: may be values.
static int64_t select(const float* values, int64_t n, float least, float* out) {
  int64_t m = 0, i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Floats v = load<Floats>(values + i);
#ifdef AVX512
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)v, (__m512)all(least), _CMP_GE_OQ);
    _mm512_mask_compressstoreu_ps(out + m, kept, (__m512)v);
    m += __builtin_popcount(kept);
#elif defined(__AVX2__)
    Part kept[PARTS];
    store(kept, v >= least);
    const int low = _mm256_movemask_ps((__m256)kept[0]), high = _mm256_movemask_ps((__m256)kept[1]);
    for (int bits = low | high << PART; bits; bits &= bits - 1) out[m++] = values[i + __builtin_ctz(bits)];
#else
    if (largest(v) < least) continue;
    for (int l = 0; l < LANES; l++) {
      const float one = values[i + l];
      out[m] = one;
      m += one >= least;
    }
#endif
  }
  for (; i < n; i++)
    if (values[i] >= least) out[m++] = values[i];
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

// As `How` in hibachi/engine/sampling/draw.py, in its order: arrays [rows].
struct How {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *typical_p, *u;
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
    if (least > 0) drop(weights, [&](Floats w) { return choose(w >= least, w, Floats{}); });
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

  // The k-th largest.
  float kth(const float* weights, int32_t k, float* some) const {
    float bound = 0;
    const int64_t groups = columns / LANES;
    if (groups >= 4 * int64_t(k)) {
      for (int64_t g = 0; g < groups; g++) some[g] = largest(load<Floats>(weights + g * LANES));
      bound = threshold(some, nullptr, groups, k);
    }
    const int64_t n = select(weights, columns, bound, some);
    return threshold(some, nullptr, n, k);
  }

  // The last of those that top_p keeps, of the weights from `least` on.
  float pth(const float* weights, float least, float top_p, float* some) const {
    const float* from = weights;
    int64_t n = columns;
    if (least > 0) n = select(weights, n, least, some), from = some;
    const double whole = sum_of(from, n), share = double(top_p) * whole;
    // What is no larger than an equal part of all that may go, can go: it is not needed for the share.
    for (double mass = whole;; from = some) {
      const int64_t before = n;
      n = select(from, n, float((mass - share) / std::max<int64_t>(1, n) * 0.999), some);
      if (!n || n > before / 4 * 3) break;
      mass = sum_of(some, n);
    }
    return threshold(some, some, n, share);
  }

  // Leaves those whose information is nearest to the entropy, until they have a share of typical_p. With w of a whole
  // W, information less entropy is (the sum of w log w) / W, less log w. Nearness falls as that grows: the largest are
  // kept.
  void typical(float* weights, float typical_p, float* near) const {
    const double whole = sum_of(weights, columns);
    double sums = 0;
    for (int64_t at = 0; at < columns; at += BLOCK) {
      Floats some = {};
      const int64_t end = std::min(columns, at + BLOCK);
      for (int64_t i = at; i < end; i += LANES) {
        const int n = std::min<int64_t>(LANES, end - i);
        const Floats w = read_some<F32>(weights + i, n), l = log(w);
        write_some<F32>(near + i, l, n);
        some = fma(w, l, some);
      }
      sums += sum(some);
    }
    const Floats mean = all(float(sums / whole));
    for (int64_t i = 0; i < columns; i += LANES) {
      const int n = std::min<int64_t>(LANES, columns - i);
      const Floats far = read_some<F32>(near + i, n) - mean;
      const Floats found = 1.0f / (1.0f + choose(far < 0.0f, -far, far));
      write_some<F32>(near + i, choose(read_some<F32>(weights + i, n) > 0.0f, found, Floats{}), n);
    }
    const float limit = threshold(near, weights, columns, double(typical_p) * whole);
    for (int64_t i = 0; i < columns; i += LANES) {
      const int n = std::min<int64_t>(LANES, columns - i);
      const Floats w = read_some<F32>(weights + i, n);
      write_some<F32>(weights + i, choose(read_some<F32>(near + i, n) < limit, Floats{}, w), n);
    }
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
