// A matrix [n, k] becomes panels of 48 rows: those of linear.h, of float32 or bfloat16, or those of int8.h.
//
// All panels are lanes of 32 bits, [n / 48][lanes of a row][48]. So there is one way to make them: the numbers of rows
// are read as float32, which is exact, become lanes as they are multiplied, and the lanes of 48 rows are turned. How
// numbers are stored, and what lanes are of them, are two structs that know nothing of each other; one more of either
// goes with all of the other kind.
//
// Rows come as they are found, some at a time, so that the parts of a matrix may lie apart, and in files.

#pragma once

#include "int8.h"
#include "linear.h"

namespace hibachi::pack {

constexpr int BLOCK = 4 * LANES;  // lanes of a row that are turned at once: with 48 rows, they fit into the first cache

static_assert(int8::WIDTH == WIDTH);

// ---- how numbers are stored: bytes(k) of a row, and 16 of its numbers from number i on, zeros after `some` ----------

template <class T>
struct Plain {
  static int64_t bytes(int64_t k) { return k * sizeof(typename T::Element); }
  static FAST Floats read(const char* row, int64_t i, int some) {
    return read_some<T>(reinterpret_cast<const typename T::Element*>(row) + i, some);
  }
};

// float16. Numbers below 2^-14 have no leading one, and infinity and NaN the largest exponent.
struct F16 {
  using Element = uint16_t;
  static FAST Floats read(const Element* p) {
    const Words h = read_halves(p), size = h & 0x7fffu;
    const Floats small = converted<Floats>((Ints)size) * 5.9604644775390625e-8f;  // 2^-24
    const Words large = (size << 13) + choose((Ints)size < 0x7c00, Words{} + (112u << 23), Words{} + (224u << 23));
    return (Floats)(choose((Ints)size < 0x400, (Words)small, large) | ((h & 0x8000u) << 16));
  }
};

// ---- what lanes are of them: DEPTH numbers, and EMPTY without any ---------------------------------------------------
//
// block(depth): how many of the lanes of a row are made at once. lanes(): `some` of them from lane `at` on; there is
// room for a multiple of 16, and for floats(k) numbers besides.

template <class T>
struct Rounded {
  static constexpr int DEPTH = T::DEPTH;
  static constexpr uint32_t EMPTY = 0;
  static int64_t block(int64_t depth) { return std::min<int64_t>(depth, BLOCK); }
  static int64_t floats(int64_t) { return 0; }

  template <class From>
  static void lanes(const char* row, int64_t k, int64_t at, int64_t some, uint32_t* out, float*, float*) {
    auto* to = reinterpret_cast<typename T::Element*>(out);
    const int64_t first = at * DEPTH, count = std::min<int64_t>(some * DEPTH, k - first);
    for (int64_t i = 0; i < count; i += LANES)
      T::put(to + i, From::read(row, first + i, std::min<int64_t>(LANES, count - i)));
  }
};

// The scale of a row comes of all of its numbers, so a row is made at once.
struct Bytes {
  static constexpr int DEPTH = int8::BYTES;
  static constexpr uint32_t EMPTY = 0x80808080;
  static int64_t block(int64_t depth) { return depth; }
  static int64_t floats(int64_t k) { return up(k, LANES) * LANES; }

  template <class From>
  static void lanes(const char* row, int64_t k, int64_t, int64_t some, uint32_t* out, float* scale, float* floats) {
    for (int64_t i = 0; i < k; i += LANES) store(floats + i, From::read(row, i, std::min<int64_t>(LANES, k - i)));
    int32_t total;
    *scale = int8::round_all<F32>(floats, k, reinterpret_cast<int8_t*>(out), total);
    for (int64_t i = 0; i < some; i++) out[i] ^= EMPTY;  // 128 added to each byte
  }
};

// ---- rows to panels -------------------------------------------------------------------------------------------------

// Rows begin ... begin + many - 1 of the n rows of a matrix. What fills up the last panel is made with the last row.
// Two calls may write into the same panel, though not at the same time.
template <class From, class Into>
struct Pack {
  const char* rows;
  const int32_t* order;  // row i is row order[i] of those given; or nullptr
  uint32_t* packed;
  float* scales;  // [n], up to a multiple of WIDTH; or nullptr
  int64_t begin, many, n, k;

  int64_t depth() const { return up(k, Into::DEPTH); }
  int64_t block() const { return up(Into::block(depth()), LANES) * LANES; }
  int64_t count() const { return up(begin + many, WIDTH) - begin / WIDTH; }
  int64_t batch(int) const { return 1; }
  int64_t scratch() const { return (WIDTH * block() + Into::floats(k)) * 4; }

  void operator()(int64_t i, char* scratch) const {
    const int64_t panel = begin / WIDTH + i, wide = block();
    const int64_t first = std::max(begin, panel * WIDTH), last = std::min(begin + many, (panel + 1) * WIDTH);
    const int64_t end = last == n ? (panel + 1) * WIDTH : last;
    auto* lanes = reinterpret_cast<uint32_t*>(scratch);
    auto* floats = reinterpret_cast<float*>(lanes + WIDTH * wide);
    for (int64_t at = 0; at < depth(); at += wide) {
      const int64_t some = std::min(wide, depth() - at);
      for (int64_t r = first; r < end; r++) {
        uint32_t* out = lanes + (r - first) * wide;
        if (r < last) {
          const char* row = rows + (order ? order[r - begin] : r - begin) * From::bytes(k);
          fetch(row, at + wide);
          Into::template lanes<From>(row, k, at, some, out, scales ? scales + r : nullptr, floats);
        } else {
          std::fill_n(out, some, Into::EMPTY);
          if (scales) scales[r] = 0.0f;
        }
      }
      uint32_t* to = packed + (panel * depth() + at) * WIDTH + first % WIDTH;
      for (int64_t l = 0; l < some; l++)
        for (int64_t r = 0; r < end - first; r++) to[l * WIDTH + r] = lanes[r * wide + l];
    }
  }

 private:
  // Ask memory for the block of a row that comes next: there are more rows than the processor follows by itself.
  void fetch(const char* row, int64_t at) const {
    const int64_t end = From::bytes(std::min(k, (at + block()) * Into::DEPTH));
    for (int64_t i = From::bytes(at * Into::DEPTH); i < end; i += 64) __builtin_prefetch(row + i);
  }
};

}  // namespace hibachi::pack
