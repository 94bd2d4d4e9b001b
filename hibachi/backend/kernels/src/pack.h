// A matrix [n, k] becomes panels of 48 rows: those of linear.h, of float32 or bfloat16, of int8.h,
// or of blocks.h.
//
// All panels are lanes of 32 bits, [n / 48][lanes of a row][48]. So there is one way to make them: the numbers of rows
// are read as float32, which is exact, become lanes as they are multiplied, and the lanes of 48 rows are turned. How
// numbers are stored, and what lanes are of them, are two structs that know nothing of each other; one more of either
// goes with all of the other kind.
//
// Rows come as they are found, some at a time, so that the parts of a matrix may lie apart, and in files.

#pragma once

#include "blocks.h"
#include "int8.h"
#include "linear.h"

namespace hibachi::pack {

constexpr int BLOCK = 4 * LANES;  // lanes of a row that are turned at once: with 48 rows, they fit into the first cache

// ---- how numbers are stored: bytes(k) of a row, and 16 of its numbers from number i on, zeros after `some` ----------

template <class T>
struct Plain {
  static int64_t bytes(int64_t k) { return k * sizeof(typename T::Element); }
  static FAST Floats read(const char* row, int64_t i, int some) {
    return read_some<T>(reinterpret_cast<const typename T::Element*>(row) + i, some);
  }
};

struct F16 {
  using Element = uint16_t;
  static FAST Floats read(const Element* p) {
    uint32_t halves[LANES];
    float numbers[LANES];
    store(halves, read_halves(p));
    for (int i = 0; i < LANES; i += PART) store(numbers + i, from_halves(load<PartWords>(halves + i)));
    return load<Floats>(numbers);
  }
};

// Blocks as GGUF has them: a scale, float16, then the lanes of blocks.h, but that those of eight bits are signed.
template <class Kind>
struct Block {
  static constexpr int SIZE = 2 + Kind::LANES * 4;
  static constexpr uint32_t SIGNS = std::is_same_v<Kind, blocks::Eight> ? 0x80808080 : 0;
  static int64_t bytes(int64_t k) { return k / blocks::BLOCK * SIZE; }

  // The lanes of the block that number i begins, of which the scale is returned.
  static FAST uint32_t lanes(const char* row, int64_t i, uint32_t* out) {
    const char* from = row + bytes(i);
    std::memcpy(out, from + 2, SIZE - 2);
    for (int l = 0; l < Kind::LANES; l++) out[l] ^= SIGNS;
    return load<uint16_t>(from);
  }

  static FAST Floats read(const char* row, int64_t i, int some) {
    uint32_t lane[Kind::LANES];
    const float scale = from_halves(PartWords{} + lanes(row, i / blocks::BLOCK * blocks::BLOCK, lane))[0];
    float v[LANES];
    for (int l = 0; l < LANES; l++) v[l] = Kind::number(lane, 1, i % blocks::BLOCK + l) * scale;
    return only(load<Floats>(v), some, 0.0f);
  }
};

// ---- what lanes are of them -----------------------------------------------------------------------------------------
//
// depth(k): lanes of a row; numbers(lanes): how many they hold; EMPTY: a lane without any. block(depth): how many of
// the lanes of a row are made at once. lanes(): `some` of them from lane `at` on; there is room for a multiple of 16,
// and for floats(k) numbers besides.

template <class T>
struct Rounded {
  static constexpr uint32_t EMPTY = 0;
  static int64_t depth(int64_t k) { return up(k, T::DEPTH); }
  static int64_t numbers(int64_t lanes) { return lanes * T::DEPTH; }
  static int64_t block(int64_t depth) { return std::min<int64_t>(depth, BLOCK); }
  static int64_t floats(int64_t) { return 0; }

  template <class From>
  static void lanes(const char* row, int64_t k, int64_t at, int64_t some, uint32_t* out, float*, float*) {
    auto* to = reinterpret_cast<typename T::Element*>(out);
    const int64_t first = numbers(at), count = std::min(numbers(some), k - first);
    for (int64_t i = 0; i < count; i += LANES)
      T::write(to + i, From::read(row, first + i, std::min<int64_t>(LANES, count - i)));
  }
};

// The scale of a row comes of all of its numbers, so a row is made at once.
struct Bytes {
  static constexpr uint32_t EMPTY = 0x80808080;
  static int64_t depth(int64_t k) { return up(k, int8::BYTES); }
  static int64_t numbers(int64_t lanes) { return lanes * int8::BYTES; }
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

// To float16: to the nearest, ties to even.
inline uint32_t half(float f) {
  const uint32_t bits = load<uint32_t>(&f), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (size > 0x7f800000) return 0x7e00;
  if (size >= 0x47800000) return sign | 0x7c00;
  if (size < 0x38800000) {  // 0.5 has 2^-24 as its last place, as denormal numbers have
    const float shifted = std::abs(f) + 0.5f;
    return sign | (load<uint32_t>(&shifted) - 0x3f000000);
  }
  return sign | (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
}

// 32 numbers as one block of Kind, rounded as gguf-py and llama.cpp do it; its scale is returned, NaN if not all are
// finite. Of four bits, what is largest becomes -8.
template <class Kind>
static float round_block(const float* x, uint32_t* lanes) {
  constexpr bool FOUR = std::is_same_v<Kind, blocks::Four>;
  Ints high = {};  // as in int8.h
  for (int i = 0; i < blocks::BLOCK; i += LANES) {
    const Ints bits = load<Ints>(x + i) & 0x7fffffff;
    high = choose(bits > high, bits, high);
  }
  const int32_t top = int8::largest(high);
  std::memset(lanes, 0, Kind::LANES * 4);
  if (top >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  const float* most = x;
  while ((load<int32_t>(most) & 0x7fffffff) != top) most++;
  const float scale = FOUR ? *most / -8.0f : std::abs(*most) / 127.0f;
  const float factor = std::abs(scale) < 1e-37f ? 0.0f : 1.0f / scale;  // below, it might be infinite
  int8_t bytes[blocks::BLOCK];
  for (int i = 0; i < blocks::BLOCK; i += LANES) {
    const Floats v = load<Floats>(x + i) * factor;
    Ints whole = converted<Ints>(FOUR ? v + 8.5f : v);
    if (FOUR) whole = choose(whole > 15, Ints{} + 15, whole);
    else whole = whole + converted<Ints>((v - converted<Floats>(whole)) * 2.0f) + 128;  // ties away from zero
    write_bytes(bytes + i, whole);
  }
  for (int i = 0; FOUR && i < blocks::BLOCK / 2; i++) bytes[i] |= bytes[i + blocks::BLOCK / 2] << 4;
  std::memcpy(lanes, bytes, Kind::LANES * 4);
  return scale;
}

// Blocks of the same kind stay as they are; other numbers are rounded.
template <class Kind>
struct Blocks {
  static constexpr uint32_t EMPTY = 0;
  static constexpr int PAIR = blocks::PAIR_LANES<Kind>;
  static int64_t depth(int64_t k) { return blocks::depth<Kind>(k); }
  static int64_t numbers(int64_t lanes) { return lanes / PAIR * int8::GROUP; }
  static int64_t block(int64_t depth) { return std::min<int64_t>(depth, BLOCK / PAIR * PAIR); }
  static int64_t floats(int64_t) { return 0; }

  template <class From>
  static void lanes(const char* row, int64_t k, int64_t at, int64_t some, uint32_t* out, float*, float*) {
    std::fill_n(out, some, EMPTY);
    for (int64_t i = numbers(at), end = std::min(k, numbers(at + some)); i < end; i += blocks::BLOCK) {
      const int64_t b = (i - numbers(at)) / blocks::BLOCK;
      uint32_t *pair = out + b / blocks::PAIR * PAIR, *to = pair + b % blocks::PAIR * Kind::LANES;
      pair[PAIR - 1] |= one<From>(row, k, i, to) << b % blocks::PAIR * 16;
    }
  }

 private:
  template <class From>
  static uint32_t one(const char* row, int64_t k, int64_t i, uint32_t* to) {
    if constexpr (std::is_same_v<From, Block<Kind>>) return From::lanes(row, i, to);
    float v[blocks::BLOCK] = {};
    const int64_t n = std::min<int64_t>(blocks::BLOCK, k - i);
    for (int64_t j = 0; j < n; j += LANES) store(v + j, From::read(row, i + j, std::min<int64_t>(LANES, n - j)));
    return half(round_block<Kind>(v, to));
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

  int64_t depth() const { return Into::depth(k); }
  int64_t block() const { return Into::block(depth()); }
  int64_t room() const { return up(block(), LANES) * LANES; }
  int64_t count() const { return up(begin + many, WIDTH) - begin / WIDTH; }
  int64_t batch(int) const { return 1; }
  int64_t scratch() const { return (WIDTH * room() + Into::floats(k)) * 4; }

  void operator()(int64_t i, char* scratch) const {
    const int64_t panel = begin / WIDTH + i, wide = room();
    const int64_t first = std::max(begin, panel * WIDTH), last = std::min(begin + many, (panel + 1) * WIDTH);
    const int64_t end = last == n ? (panel + 1) * WIDTH : last;
    auto* lanes = reinterpret_cast<uint32_t*>(scratch);
    auto* floats = reinterpret_cast<float*>(lanes + WIDTH * wide);
    for (int64_t at = 0; at < depth(); at += block()) {
      const int64_t some = std::min(block(), depth() - at);
      for (int64_t r = first; r < end; r++) {
        uint32_t* out = lanes + (r - first) * wide;
        if (r < last) {
          const char* row = rows + (order ? order[r - begin] : r - begin) * From::bytes(k);
          fetch(row, at + block());
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
  FAST void fetch(const char* row, int64_t at) const {
    const int64_t end = From::bytes(std::min(k, Into::numbers(at + block())));
    for (int64_t i = From::bytes(Into::numbers(at)); i < end; i += 64) __builtin_prefetch(row + i);
  }
};

}  // namespace hibachi::pack
