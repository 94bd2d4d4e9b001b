// y = x W^T + b with weights in blocks, as GGUF's Q4_0 and Q8_0 have them.
//
// A block is 32 numbers of a row of W [n, k]: integers of four or eight bits, and one scale, float16. Rows of x are
// rounded as int8.h has them, so that each scale of theirs goes with two blocks. The products of a block are added up
// in int32, which is exact; that sum times the block's scale, rounded, times the scale of x is added to the row's sum
// in float32, block by block. So what a row comes to depends on that row alone, and on no instructions.
//
// W is stored in panels of 48 rows, [n / 48][k / 64][lanes of two blocks, and one of their two scales][48], so that
// memory is read from its beginning to its end. Its numbers are unsigned, `Kind::ZERO` too large; what
// that adds is known from the sum of a block of x.

#pragma once

#include "int8.h"

namespace hibachi::blocks {

using int8::Rounded;

constexpr int BLOCK = Rounded::BLOCK, PAIR = int8::GROUP / BLOCK;

// The sums of a block as int8.h forms them.
struct Exact {
  using Wide = int8::Wide;
  static FAST Wide wide(PartWords w) { return int8::wide(w); }
  static FAST int8::Spread spread(uint32_t x) { return int8::spread(x); }
  static FAST PartInts multiply(PartInts sums, const Wide& w, const int8::Spread& x) {
    return int8::multiply(sums, w, x);
  }
  static FAST PartInts begin(int32_t start) { return PartInts{} + start; }
  static FAST PartInts total(PartInts sums, int32_t) { return sums; }
};

// The same of numbers below 16, where no instruction adds up products of bytes: 32 * 15 * 127 / 2 is below 2^15.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
struct Small {
  using Wide = PartWords;
  static FAST Wide wide(PartWords w) { return w; }
  static FAST PartWords spread(uint32_t x) { return PartWords{} + x; }
#ifdef AVX512
  static FAST PartInts multiply(PartInts sums, Wide w, PartWords x) {
    return (PartInts)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
  }
#else
  static FAST PartInts multiply(PartInts sums, Wide w, PartWords x) {
    return (PartInts)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
  }
#endif
  static FAST PartInts begin(int32_t) { return PartInts{}; }
  static FAST PartInts total(PartInts sums, int32_t start) {
    return int8::pairs((PartWords)sums, PartWords{} + 0x00010001u) + start;
  }
};
#else
using Small = Exact;
#endif

// A lane of a block: four numbers of eight bits.
struct Eight {
  using Sums = Exact;
  static constexpr int LANES = 8, HALVES = 1, ZERO = 128;  // LANES: of a block
  static FAST PartWords half(PartWords lanes, int) { return lanes; }
  static FAST int number(const uint32_t* lanes, int apart, int i) {  // number i of a block
    return int(lanes[i / 4 * apart] >> i % 4 * 8 & 255) - ZERO;
  }
};

// Four numbers of four bits, and above each of them the one sixteen numbers later.
struct Four {
  using Sums = Small;
  static constexpr int LANES = 4, HALVES = 2, ZERO = 8;
  static FAST PartWords half(PartWords lanes, int h) { return (h ? lanes >> 4 : lanes) & 0x0f0f0f0fu; }
  static FAST int number(const uint32_t* lanes, int apart, int i) {
    return int(lanes[i % 16 / 4 * apart] >> (i % 4 * 8 + i / 16 * 4) & 15) - ZERO;
  }
};

template <class Kind>
constexpr int PAIR_LANES = PAIR * Kind::LANES + 1;

template <class Kind>
inline int64_t depth(int64_t k) {  // lanes of a row
  return up(k, int8::GROUP) * PAIR_LANES<Kind>;
}

// As in linear.h.
template <class Kind>
struct Factors {
  static constexpr int64_t WORTH = int8::Factors::WORTH;
  static constexpr int ROWS = int8::Factors::ROWS;

  Rounded x;
  const uint32_t* w = nullptr;

  // Rows that are rounded already: they are only read.
  Factors(const void* rows, int64_t, int64_t m, int64_t k) : x(const_cast<void*>(rows), m, k) {}

  Factors of(int64_t begin, const void* panels, const float*) const {
    Factors found = *this;
    found.x = x.from(begin), found.w = static_cast<const uint32_t*>(panels);
    return found;
  }

  template <int N>
  void multiply(int64_t i, int64_t p, Span span, const Ahead& ahead, Floats (&out)[N][COLUMNS]) const {
    using Sums = Kind::Sums;
    const int64_t steps = ahead.steps();
    constexpr int WIDE = 2 * N * COLUMNS * PARTS <= REGISTERS ? COLUMNS : 1, PIECES = WIDE * PARTS;
    for (int first = 0; first < COLUMNS; first += WIDE) {
      const uint32_t* at = w + (p * depth<Kind>(span.k) + depth<Kind>(span.begin)) * WIDTH + first * LANES;
      Part sums[N][PIECES] = {};
      for (int64_t g = span.begin / int8::GROUP; g < up(span.end, int8::GROUP); g++, at += WIDTH) {
        const uint32_t* scales = at + PAIR * Kind::LANES * WIDTH;
        for (int b = 0; b < PAIR; b++) {
          PartInts block[N][PIECES];
          const int64_t place = (i * x.groups + g) * PAIR + b, next = x.groups * PAIR;  // of x; to its next row
          for (int r = 0; r < N; r++)
            for (int c = 0; c < PIECES; c++) block[r][c] = Sums::begin(Kind::ZERO / 8 * x.totals[place + r * next]);
          for (int s = 0; s < Kind::LANES; s++, at += WIDTH) {
            for (int c = 0; steps && c < WIDE; c++) ask<N>(at + steps * WIDTH + c * LANES);
            for (int h = 0; h < Kind::HALVES; h++) {
              typename Sums::Wide v[PIECES];
              for (int c = 0; c < PIECES; c++) v[c] = Sums::wide(Kind::half(load<PartWords>(at + c * PART), h));
              for (int r = 0; r < N; r++) {
                const int8_t* bytes = x.values + (place + r * next) * BLOCK + s * int8::BYTES + h * BLOCK / 2;
                const auto all = Sums::spread(load<uint32_t>(bytes));
                for (int c = 0; c < PIECES; c++) block[r][c] = Sums::multiply(block[r][c], v[c], all);
              }
            }
          }
          for (int c = 0; c < PIECES; c++) {
            const Part scale = from_halves(load<PartWords>(scales + c * PART) >> 16 * b & 0xffffu);
            for (int r = 0; r < N; r++) {
              const PartInts exact = Sums::total(block[r][c], Kind::ZERO / 8 * x.totals[place + r * next]);
              const Part of_x = Part{} + x.scales[(i + r) * x.groups + g];
              sums[r][c] = fma(__builtin_convertvector(exact, Part) * scale, of_x, sums[r][c]);
            }
          }
        }
      }
      for (int r = 0; r < N; r++) std::memcpy(&out[r][first], sums[r], sizeof sums[r]);
    }
  }
};

// Rows `at` of W, from its panels: out [many, k].
template <class T, class Kind>
struct Rows {
  const uint32_t* packed;
  const int32_t* at;
  typename T::Element* out;
  int64_t many, k;

  int64_t count() const { return many; }
  int64_t batch(int) const { return 4; }

  void operator()(int64_t i) const {
    const uint32_t* row = packed + at[i] / WIDTH * depth<Kind>(k) * WIDTH + at[i] % WIDTH;
    for (int64_t j = 0; j < k; j += LANES) {
      const uint32_t* pair = row + j / int8::GROUP * PAIR_LANES<Kind> * WIDTH;
      const int b = j % int8::GROUP / BLOCK;
      const uint32_t scale = pair[PAIR * Kind::LANES * WIDTH] >> 16 * b & 0xffffu;
      float v[LANES];
      for (int l = 0; l < LANES; l++) v[l] = Kind::number(pair + b * Kind::LANES * WIDTH, WIDTH, j % BLOCK + l);
      write_some<T>(
          out + i * k + j, load<Floats>(v) * from_halves(PartWords{} + scale)[0], std::min<int64_t>(LANES, k - j)
      );
    }
  }
};

}  // namespace hibachi::blocks

namespace hibachi {

// What panels are of, as in packing.py.
enum Panels : int32_t { FLOAT32, BFLOAT16, INT8, Q4_0, Q8_0 };

// f(std::type_identity<X>{}), the factors of products with panels of such a kind.
template <class T, class F>
FAST auto with_factors(int kind, const F& f) {
  switch (kind) {
    case INT8: return f(std::type_identity<int8::Factors>{});
    case Q4_0: return f(std::type_identity<blocks::Factors<blocks::Four>>{});
    case Q8_0: return f(std::type_identity<blocks::Factors<blocks::Eight>>{});
    default: return f(std::type_identity<Factors<T>>{});
  }
}

}  // namespace hibachi
