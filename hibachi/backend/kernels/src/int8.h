// y = x W^T + b with weights of eight bits.
//
// W [n, k] is rounded to integers from -127 to 127, with one scale for each of its rows. Rows of x are rounded in the
// same way when they are multiplied, with one scale for each GROUP of their numbers: a few large numbers in a row,
// which language models have, would leave too few steps for the others. What a row comes to depends on that row alone.
//
// Products are added up in int32, which is exact, group by group; the groups of a row are added up in float32, in their
// order. W is stored in panels of 48 rows, [n / 48][k / 4][48] lanes of four bytes, with 128 added to each, as the
// machine multiplies unsigned by signed bytes. What that adds to the sums is 128 times the sum of a group of x, so each
// sum starts at minus that.

#pragma once

#include <numeric>

#include "lanes.h"
#include "linear.h"
#include "memory.h"

namespace hibachi::int8 {

constexpr int BYTES = 4;   // of a lane
constexpr int GROUP = 64;  // numbers of a row of x with one scale
constexpr int STEPS = GROUP / BYTES;
constexpr int LARGEST = 127;

// The bytes of a register of W, unsigned, and four bytes of x, signed, as they are multiplied.
#if defined(AVX512) && defined(__AVX512VNNI__)
using Wide = PartWords;
using Spread = PartWords;
inline Wide wide(PartWords w) { return w; }
inline Spread spread(uint32_t x) { return PartWords{} + x; }
inline PartInts multiply(PartInts sums, Wide w, Spread x) {
  return (PartInts)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
}
#elif defined(__AVX2__)
// As numbers of 16 bits, two of each lane: no product of bytes that saturates.
struct Wide {
  PartWords even, odd;
};
using Spread = Wide;
inline Wide wide(PartWords w) { return {w & 0x00ff00ffu, (w >> 8) & 0x00ff00ffu}; }
#ifdef AVX512
inline Spread spread(uint32_t x) {
  const __m512i all = (__m512i)(PartWords{} + x);
  return {(PartWords)_mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), (PartWords)_mm512_srai_epi16(all, 8)};
}
inline PartInts pairs(PartWords w, PartWords x) { return (PartInts)_mm512_madd_epi16((__m512i)w, (__m512i)x); }
#else
inline Spread spread(uint32_t x) {
  const __m256i all = (__m256i)(PartWords{} + x);
  return {(PartWords)_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), (PartWords)_mm256_srai_epi16(all, 8)};
}
inline PartInts pairs(PartWords w, PartWords x) { return (PartInts)_mm256_madd_epi16((__m256i)w, (__m256i)x); }
#endif
inline PartInts multiply(PartInts sums, const Wide& w, const Spread& x) {
  return sums + pairs(w.even, x.even) + pairs(w.odd, x.odd);
}
#else
struct Wide {
  PartInts bytes[BYTES];
};
struct Spread {
  int32_t bytes[BYTES];
};
inline Wide wide(PartWords w) {
  return {(PartInts)(w & 255u), (PartInts)((w >> 8) & 255u), (PartInts)((w >> 16) & 255u), (PartInts)(w >> 24)};
}
inline Spread spread(uint32_t x) { return {(int8_t)x, (int8_t)(x >> 8), (int8_t)(x >> 16), (int8_t)(x >> 24)}; }
inline PartInts multiply(PartInts sums, const Wide& w, const Spread& x) {
  for (int i = 0; i < BYTES; i++) sums += w.bytes[i] * x.bytes[i];
  return sums;
}
#endif

FAST int32_t sum(Ints v) {
#ifdef AVX512
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  return folded(v, [](auto a, auto b) { return a + b; });
#endif
}

FAST int32_t largest(Ints v) {
#ifdef AVX512
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  return folded(v, [](auto a, auto b) { return a > b ? a : b; });
#endif
}

// x [n] as scale * q, the scale returned: q to the nearest, ties to even. Of numbers that are not all finite the scale
// is NaN, of tiny ones 0, and all q are 0. q has room for whole vectors, and is 0 after n. total: of q.
template <class T>
FAST float round_all(const typename T::Element* x, int64_t n, int8_t* q, int32_t& total) {
  Ints high = {};  // the bits of a positive float are in the order of the numbers, infinity and NaN the largest
  for (int64_t i = 0; i < n; i += LANES) {
    Ints bits = (Ints)read_some<T>(x + i, std::min<int64_t>(LANES, n - i)) & 0x7fffffff;
    high = choose(bits > high, bits, high);
  }
  const int32_t top = largest(high);
  float most;
  std::memcpy(&most, &top, sizeof most);
  const bool rounds = most > 1e-30f && most <= std::numeric_limits<float>::max();  // below, 1 / most would be infinite
  const Floats factor = all(rounds ? LARGEST / most : 0.0f), shift = all(12582912.0f);  // 1.5 * 2^23: it rounds
  Ints sums = {};
  for (int64_t i = 0; i < n; i += LANES) {
    Ints whole = {};
    if (rounds) {
      Floats v = read_some<T>(x + i, std::min<int64_t>(LANES, n - i));
      whole = converted<Ints>(v * factor + shift - shift);
      sums += whole;
    }
    write_bytes(q + i, whole);
  }
  total = sum(sums);
  return rounds ? most / LARGEST : most <= 1e-30f ? 0.0f : std::numeric_limits<float>::quiet_NaN();
}

// Rows of x, rounded. All are owned by whoever made the memory, `Rounded::bytes`.
struct Rounded {
  int8_t* values;   // [m, groups * GROUP], zeros after k
  float* scales;    // [m, groups]
  int32_t* starts;  // [m, groups]: -128 times the sum of a group's values
  int32_t* totals;  // [m, groups, GROUP / BLOCK]: -8 times the sums of the blocks in a group, see blocks.h
  int64_t groups;

  static constexpr int BLOCK = 32;
  static constexpr int64_t EACH = GROUP + sizeof(float) + (1 + GROUP / BLOCK) * sizeof(int32_t);
  static int64_t bytes(int64_t m, int64_t k) { return m * up(k, GROUP) * EACH; }

  Rounded(void* memory, int64_t m, int64_t k) : groups(up(k, GROUP)) {
    values = static_cast<int8_t*>(memory);
    scales = reinterpret_cast<float*>(values + m * groups * GROUP);
    starts = reinterpret_cast<int32_t*>(scales + m * groups);
    totals = starts + m * groups;
  }

  // The rows from row i on.
  Rounded from(int64_t i) const {
    Rounded found = *this;
    found.values += i * groups * GROUP, found.scales += i * groups, found.starts += i * groups;
    found.totals += i * groups * (GROUP / BLOCK);
    return found;
  }

  // Row i becomes x [k].
  template <class T>
  void round(int64_t i, const typename T::Element* x, int64_t k) const {
    for (int64_t g = 0; g < groups; g++) {
      int8_t* q = values + (i * groups + g) * GROUP;
      const int64_t n = std::min<int64_t>(GROUP, k - g * GROUP);
      if (n < GROUP) std::memset(q, 0, GROUP);
      int32_t total;
      scales[i * groups + g] =
          n < GROUP ? round_all<T>(x + g * GROUP, n, q, total) : round_all<T>(x + g * GROUP, GROUP, q, total);
      starts[i * groups + g] = -128 * total;
      int32_t* part = totals + (i * groups + g) * (GROUP / BLOCK);
      for (int b = 0; b < GROUP / BLOCK; b++) part[b] = -8 * std::reduce(q + b * BLOCK, q + (b + 1) * BLOCK, int32_t{});
    }
  }
};

// Rows of x [m, k] become `rounded`.
template <class T>
struct Round {
  const typename T::Element* x;
  int64_t x_stride;  // elements from row to row, as are the others
  Rounded rounded;
  int64_t m, k;

  int64_t count() const { return m; }
  int64_t batch(int) const { return 4; }
  void operator()(int64_t i) const { rounded.round<T>(i, x + i * x_stride, k); }
};

// As in linear.h. Sums of a group and sums of all stay in registers.
struct Factors {
  static constexpr int64_t WORTH = 65536;
  static constexpr int ROWS = 4;

  Rounded x;
  const uint32_t* w = nullptr;
  const float* scales = nullptr;  // of the rows of W, up to a multiple of WIDTH

  // Rows that are rounded already: they are only read.
  Factors(const void* rows, int64_t, int64_t m, int64_t k) : x(const_cast<void*>(rows), m, k) {}

  Factors of(int64_t begin, const void* panels, const float* its) const {
    Factors found = *this;
    found.x = x.from(begin), found.w = static_cast<const uint32_t*>(panels), found.scales = its;
    return found;
  }

  template <int N>
  void multiply(int64_t i, int64_t p, Span span, const Ahead& ahead, Floats (&out)[N][COLUMNS]) const {
    constexpr int WIDE = 2 * N * COLUMNS * PARTS <= REGISTERS ? COLUMNS : 1;
    const int64_t depth = up(span.end, BYTES), further = ahead.steps();
    for (int first = 0; first < COLUMNS; first += WIDE) {
      const uint32_t* at = w + (p * up(span.k, BYTES) + span.begin / BYTES) * WIDTH + first * LANES;
      Part sums[N][WIDE * PARTS] = {};
      for (int64_t g = span.begin / GROUP; g < up(span.end, GROUP); g++) {
        const int8_t* values[N];
        PartInts group[N][WIDE * PARTS];
        for (int r = 0; r < N; r++) {
          values[r] = x.values + ((i + r) * x.groups + g) * GROUP;
          for (int c = 0; c < WIDE * PARTS; c++) group[r][c] = PartInts{} + x.starts[(i + r) * x.groups + g];
        }
        const int steps = std::min<int64_t>(STEPS, depth - g * STEPS);
        for (int s = 0; s < steps; s++, at += WIDTH) {
          for (int c = 0; further && c < WIDE; c++) ask<N>(at + further * WIDTH + c * LANES);
          Wide v[WIDE * PARTS];
          for (int c = 0; c < WIDE * PARTS; c++) v[c] = wide(load<PartWords>(at + c * PART));
          for (int r = 0; r < N; r++) {
            const Spread bytes = spread(load<uint32_t>(values[r] + s * BYTES));
            for (int c = 0; c < WIDE * PARTS; c++) group[r][c] = int8::multiply(group[r][c], v[c], bytes);
          }
        }
        for (int r = 0; r < N; r++) {
          const Part scale = Part{} + x.scales[(i + r) * x.groups + g];
          for (int c = 0; c < WIDE * PARTS; c++)
            sums[r][c] = fma(__builtin_convertvector(group[r][c], Part), scale, sums[r][c]);
        }
      }
      const float* each = scales + p * WIDTH + first * LANES;
      for (int r = 0; r < N; r++)
        for (int c = 0; c < WIDE * PARTS; c++) sums[r][c] *= load<Part>(each + c * PART);
      for (int r = 0; r < N; r++) std::memcpy(&out[r][first], sums[r], sizeof sums[r]);
    }
  }
};

// Rows `at` of W, from its panels: out [many, k].
template <class T>
struct Rows {
  const uint8_t* packed;
  const float* scales;
  const int32_t* at;
  typename T::Element* out;
  int64_t many, k;

  int64_t count() const { return many; }
  int64_t batch(int) const { return 4; }

  void operator()(int64_t i) const {
    const uint8_t* from = packed + (at[i] / WIDTH * up(k, BYTES) * WIDTH + at[i] % WIDTH) * BYTES;
    for (int64_t j = 0; j < k; j += LANES) {
      float v[LANES] = {};
      int some = std::min<int64_t>(LANES, k - j);
      for (int l = 0; l < some; l++) v[l] = from[(j + l) / BYTES * WIDTH * BYTES + (j + l) % BYTES] - 128;
      write_some<T>(out + i * k + j, load<Floats>(v) * scales[at[i]], some);
    }
  }
};

}  // namespace hibachi::int8
