// Logits with -inf for tokens that may not come. Packed bits say which may: bit t % 32 of word t / 32 of a row. What
// lies beyond the last token means nothing.

#pragma once

#include "memory.h"
#include "small.h"

namespace hibachi {

constexpr int WORD = 32;  // tokens of a word
constexpr uint32_t EVERY = ~uint32_t(0);
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// v where the bit of its lane is set.
inline Part kept(Part v, uint32_t bits) {
  PartWords lane;
  for (int l = 0; l < PART; l++) lane[l] = 1u << l;
  return ((PartWords{} + bits) & lane) != 0u ? v : Part{} + NEVER;
}

template <class T>
inline Part read_part(const typename T::Element* p) {
  if constexpr (PART == LANES) {
    return T::read(p);
  } else if constexpr (std::is_same_v<T, F32>) {
    return load<Part>(p);
  } else {
    typedef uint16_t Halves __attribute__((vector_size(2 * PART)));
    return (Part)(__builtin_convertvector(load<Halves>(p), PartWords) << 16);
  }
}

// x [rows, columns] where it lies. Most words are all zeros or all ones: those are not read, these not even written.
struct KeepBits {
  float* x;
  const uint32_t* bits;
  int64_t rows, columns;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return worth(LIGHT, columns); }

  void operator()(int64_t i) const {
    float* row = x + i * columns;
    const uint32_t* words = bits + i * up(columns, WORD);
    int64_t d = 0;
    for (; d + WORD <= columns; d += WORD) {
      const uint32_t word = words[d / WORD];
      if (word == EVERY) continue;
      if (!word)
        for (int p = 0; p < WORD; p += PART) store(row + d + p, Part{} + NEVER);
      else
        for (int p = 0; p < WORD; p += PART) store(row + d + p, kept(load<Part>(row + d + p), word >> p));
    }
    for (const int64_t from = d; d < columns; d++)
      if (!(words[from / WORD] >> (d - from) & 1)) row[d] = NEVER;
  }
};

// x [rows, columns]: rows `at` of logits, with -inf for what may not come. finite: whether there is something to draw
// from in a row as it was: no NaN, no infinity, and not -inf alone.
template <class T>
struct KeptRows {
  const typename T::Element* logits;
  const int32_t* at;
  const uint32_t* bits;  // or nullptr: all may come
  float* x;
  bool* finite;
  int64_t rows, columns;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return worth(LIGHT, columns); }

  void operator()(int64_t i) const {
    const auto* from = logits + at[i] * columns;
    const uint32_t* words = bits ? bits + i * up(columns, WORD) : nullptr;
    float *to = x + i * columns, most = NEVER;
    Part high = Part{} + NEVER;
    PartInts wrong = {};
    int64_t d = 0;
    for (; d + WORD <= columns; d += WORD) {
      const uint32_t word = words ? words[d / WORD] : EVERY;
      for (int p = 0; p < WORD; p += PART) {
        const Part v = read_part<T>(from + d + p);
        high = v > high ? v : high;
        wrong |= v != v;
        store(to + d + p, kept(v, word >> p));
      }
    }
    bool nan = false;
    for (int l = 0; l < PART; l++) nan |= wrong[l] != 0, most = std::max(most, high[l]);
    for (const int64_t end = d; d < columns; d++) {
      const float v = read_some<T>(from + d, 1)[0];
      nan |= v != v;
      most = v > most ? v : most;
      to[d] = !words || words[end / WORD] >> (d - end) & 1 ? v : NEVER;
    }
    finite[i] = !nan && most > NEVER && most < -NEVER;
  }
};

}  // namespace hibachi
