// Sixteen lanes of 32 bits: what all kernels are made of.
//
// A lane holds what is multiplied at once: one float32, or a pair of bfloat16. Kernels are templates over these two.
// The order in which a sum is formed is written out everywhere (the build switches contraction off), so that it
// depends on nothing but the sizes of the layer. Every number that is written has the same bits on every processor: a
// product that is added is rounded once, and a NaN is always the same one.
//
// A kernel is a struct with a number of parts, count(), that are computed by calling it with 0 ... count() - 1, in any
// order and by any thread, batch(threads) of them at a time. If it has scratch(), it is called with so many bytes of
// memory that no other thread has. Whose threads these are is the affair of those who include this.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define AVX512
#endif
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace hibachi {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

// What fits into a register of the machine: 16, 8 or 4 lanes. The innermost loops are written with these, as compilers
// keep nothing wider in registers. What is added in which order is a matter of the sixteen lanes alone.
#if defined(AVX512)
constexpr int PART = 16, REGISTERS = 24;  // REGISTERS: for sums; the others hold what is multiplied
#elif defined(__AVX2__)
constexpr int PART = 8, REGISTERS = 12;
#else
constexpr int PART = 4, REGISTERS = 24;
#endif
constexpr int PARTS = LANES / PART;
typedef float Part __attribute__((vector_size(4 * PART)));
typedef int32_t PartInts __attribute__((vector_size(4 * PART)));
typedef uint32_t PartWords __attribute__((vector_size(4 * PART)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline Floats all(float f) { return Floats{} + f; }
inline Words all_words(uint32_t w) { return Words{} + w; }

// a * b + c, rounded once.
inline Part fma(Part a, Part b, Part c) {
#if defined(AVX512)
  return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < PART; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

#ifndef AVX512
inline Floats fma(Floats a, Floats b, Floats c) {
  Part x[PARTS], y[PARTS], z[PARTS];
  std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b), std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < PARTS; i++) z[i] = fma(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
}
#endif

inline Floats same_nan(Floats v) { return v == v ? v : all(std::numeric_limits<float>::quiet_NaN()); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The sum of the lanes, halves onto halves.
inline float sum(Floats v) {
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}

inline float largest(Floats v) {
#ifdef AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// e^x for x <= 88; 0 below -87; NaN of NaN. Relative error below 2e-7 (Cephes' polynomial on [-ln2/2, ln2/2]).
inline Floats exp(Floats x) {
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats n = fma(x, all(1.44269504f), shift) - shift;
  Floats r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, all(c));
  p = fma(p * r, r, r) + 1.0f;
#ifdef AVX512
  Floats y = (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  Floats y = p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
#endif
  return x < -87.0f ? Floats{} : y;  // of NaN, p is NaN
}

inline Floats sigmoid(Floats x) {
  Floats e = exp(x < 0.0f ? x : -x);  // never overflows
  return (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
}

inline Floats tanh(Floats x) {
  Floats e = exp((x < 0.0f ? x : -x) * 2.0f);
  Floats t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

// The natural logarithm of x > 0 that is not denormal, as twice artanh of a number near 0; of 0, some number.
inline Floats log(Floats x) {
  const Words b = (Words)x;
  Ints e = (Ints)(b >> 23) - 127;
  Floats m = (Floats)((b & 0x7fffffu) | 0x3f800000u);
  const Ints half = m > 1.41421356f;
  m = half ? m * 0.5f : m;
  e -= half;  // true is -1
  const Floats n = __builtin_convertvector(e, Floats), s = (m - 1.0f) / (m + 1.0f);
  Floats p = all(0.222222222f);
  for (float c : {0.285714286f, 0.4f, 0.666666667f, 2.0f}) p = fma(p, s * s, all(c));
  return fma(n, all(0.693359375f), fma(n, all(-2.12194440e-4f), p * s));
}

// log(1 + e^x). log(1 + e) = 2 artanh(e / (2 + e)), of which the series is cut where it is below half a unit.
inline Floats softplus(Floats x) {
  Floats e = exp(x < 0.0f ? x : -x), s = e / (2.0f + e), p = all(0.153846154f);
  for (float c : {0.181818182f, 0.222222222f, 0.285714286f, 0.4f, 0.666666667f, 2.0f}) p = fma(p, s * s, all(c));
  return fma(p, s, larger(x, Floats{}));
}

// The normal distribution function, by the error function's formula 7.1.26 of Abramowitz & Stegun. Error below 3e-7.
inline Floats normal(Floats x) {
  Floats z = (x < 0.0f ? -x : x) * 0.707106781f;
  Floats t = 1.0f / fma(z, all(0.3275911f), all(1.0f)), series = all(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) series = fma(series, t, all(c));
  Floats tail = 0.5f * series * t * exp(-(z * z));
  return x < 0.0f ? tail : 1.0f - tail;
}

// float32.
struct F32 {
  using Element = float;
  using Lane = float;
  using Bits = uint32_t;
  using Wide = Part;                            // lanes of a weight as they are multiplied, of one register
  static constexpr int DEPTH = 1;               // elements in a lane
  static constexpr Bits EXPONENT = 0x7f800000;  // all ones in infinity and NaN
  static Element nan() { return std::numeric_limits<float>::quiet_NaN(); }

  static Wide wide(PartWords w) { return (Part)w; }
  static Part multiply(Part sums, Wide w, Lane x) { return fma(w, Part{} + x, sums); }
  static Floats read(const Element* p) { return load<Floats>(p); }
  static void write(Element* p, Floats v) { store(p, same_nan(v)); }
  static Floats rounded(Floats v) { return v; }
  static Floats put(Element* p, Floats v) { return store(p, v), v; }
};

// bfloat16, as its 16 bits; sums are float32. Instructions that multiply bfloat16 are not used: they are no faster than
// two products of float32, and leave denormal numbers out. The second of a pair is added first, as they do.
struct Bf16 {
  using Element = uint16_t;
  typedef uint32_t Lane __attribute__((aligned(2), may_alias));  // two elements, wherever they lie
  using Bits = uint16_t;
  static constexpr int DEPTH = 2;
  static constexpr Bits EXPONENT = 0x7f80;
  static Element nan() { return 0x7fc0; }

  struct Wide {
    Part first, second;
  };
  static Wide wide(PartWords w) { return {(Part)(w << 16), (Part)(w & 0xffff0000u)}; }
  static Part multiply(Part sums, const Wide& w, Lane x) {
    const PartWords both = PartWords{} + x;
    sums = fma(w.second, (Part)(both & 0xffff0000u), sums);
    return fma(w.first, (Part)(both << 16), sums);
  }

  // Compilers split conversions between 16 and 32 bits into halves, so they are spelled out where there are masks.
#ifdef AVX512
  static Floats widened(__m256i v) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); }

  static __m256i narrow(Floats v) { return _mm512_cvtepi32_epi16((__m512i)bits(v)); }

  static Floats read(const Element* p) { return widened(load<__m256i>(p)); }
  static void write(Element* p, Floats v) { store(p, narrow(v)); }
  static Floats rounded(Floats v) { return widened(narrow(v)); }

  static Floats put(Element* p, Floats v) {  // writes, and returns what was written
    const __m256i n = narrow(v);
    store(p, n);
    return widened(n);
  }
#else
  typedef uint16_t Halves __attribute__((vector_size(32)));
  static Floats read(const Element* p) { return (Floats)(__builtin_convertvector(load<Halves>(p), Words) << 16); }
  static void write(Element* p, Floats v) { store(p, __builtin_convertvector(bits(v), Halves)); }
  static Floats rounded(Floats v) { return (Floats)(bits(v) << 16); }
  static Floats put(Element* p, Floats v) { return write(p, v), rounded(v); }
#endif

  static Words bits(Floats v) {  // to the nearest, ties to even
    Words w = (Words)v;
    Words near = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    return v != v ? all_words(0x7fc0) : near;
  }
};

// The first n lanes of a row's end, zeros after them; and the way back.
template <class T>
inline Floats read_some(const typename T::Element* p, int n) {
  if (n >= LANES) return T::read(p);
  typename T::Element some[LANES] = {};
  std::memcpy(some, p, n * sizeof *p);
  return T::read(some);
}

template <class T>
inline void write_some(typename T::Element* p, Floats v, int n) {
  if (n >= LANES) return T::write(p, v);
  typename T::Element some[LANES];
  T::write(some, v);
  std::memcpy(p, some, n * sizeof *p);
}

// f(std::integral_constant<int, n>) for 1 <= n <= MOST.
template <int MOST, class F>
inline void with_constant(int n, const F& f) {
  if constexpr (MOST == 1) {
    f(std::integral_constant<int, 1>{});
  } else {
    if (n == MOST) return f(std::integral_constant<int, MOST>{});
    with_constant<MOST - 1>(n, f);
  }
}

}  // namespace hibachi
