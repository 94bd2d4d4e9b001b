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

#include "registers.h"

namespace hibachi {

FAST Floats all(float f) { return Floats{} + f; }

FAST Floats same_nan(Floats v) { return choose(v == v, v, all(std::numeric_limits<float>::quiet_NaN())); }

FAST Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }

// 0, 1, 2 and so on.
FAST Ints numbers() {
  constexpr int32_t lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<Ints>(lane);
}

// Lanes from n on as `other`.
FAST Floats only(Floats v, int n, float other) { return n >= LANES ? v : choose(numbers() < n, v, all(other)); }

// f of the lanes, halves onto halves.
template <class V, class F>
FAST auto folded(V v, const F& f) {
  if constexpr (requires { v.part; }) {
    for (int n = PARTS / 2; n; n /= 2)
      for (int i = 0; i < n; i++) v.part[i] = f(v.part[i], v.part[i + n]);
    return folded(v.part[0], f);
  } else if constexpr (sizeof v == 16) {
    return f(f(v[0], v[2]), f(v[1], v[3]));
  } else {
    typedef std::remove_reference_t<decltype(v[0])> Half __attribute__((vector_size(sizeof v / 2)));
    Half half[2];
    std::memcpy(half, &v, sizeof v);
    return folded(f(half[0], half[1]), f);
  }
}

FAST float sum(Floats v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}

// Of numbers that are no NaN.
FAST float largest(Floats v) {
#ifdef AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  return folded(v, [](auto a, auto b) { return a > b ? a : b; });
#endif
}

// p * 2^n for a whole n from -126 to 127.
FAST Floats scaled(Floats p, Floats n) {
#ifdef AVX512
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * (Floats)((converted<Ints>(n) + 127) << 23);
#endif
}

// e^x for x <= 88; 0 below -87; NaN of NaN. Relative error below 2e-7 (Cephes' polynomial on [-ln2/2, ln2/2]).
FAST Floats exp(Floats x) {
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats n = fma(x, all(1.44269504f), shift) - shift;
  Floats r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, all(c));
  p = fma(p * r, r, r) + 1.0f;
  return choose(x < -87.0f, Floats{}, scaled(p, n));  // of NaN, p is NaN
}

// e^x for x <= 0 as exactly as bfloat16 needs: the relative error is below 5e-6 (2^f on [-1/2, 1/2], minimax). NaN of
// NaN.
FAST Floats exp_near(Floats x) {
  const Floats shift = all(12582912.0f);  // as above
  Floats n = fma(x, all(1.44269504f), shift) - shift;
  Floats r = fma(x, all(1.44269504f), -n);
  Floats p = all(9.582846368e-3f);
  for (float c : {5.590643179e-2f, 2.402409881e-1f, 6.931241924e-1f, 1.0f}) p = fma(p, r, all(c));
  return choose(x < -87.0f, Floats{}, scaled(p, n));
}

FAST Floats sigmoid(Floats x) {
  Floats e = exp(choose(x < 0.0f, x, -x));  // never overflows
  return choose(x < 0.0f, e, all(1.0f)) / (1.0f + e);
}

FAST Floats tanh(Floats x) {
  Floats e = exp(choose(x < 0.0f, x, -x) * 2.0f);
  Floats t = (1.0f - e) / (1.0f + e);
  return choose(x < 0.0f, -t, t);
}

// The natural logarithm of x > 0 that is not denormal, as twice artanh of a number near 0; of 0, some number.
FAST Floats log(Floats x) {
  const Words b = (Words)x;
  Ints e = (Ints)(b >> 23) - 127;
  Floats m = (Floats)((b & 0x7fffffu) | 0x3f800000u);
  const Ints half = m > 1.41421356f;
  m = choose(half, m * 0.5f, m);
  e -= half;  // true is -1
  const Floats n = converted<Floats>(e), s = (m - 1.0f) / (m + 1.0f);
  Floats p = all(0.222222222f);
  for (float c : {0.285714286f, 0.4f, 0.666666667f, 2.0f}) p = fma(p, s * s, all(c));
  return fma(n, all(0.693359375f), fma(n, all(-2.12194440e-4f), p * s));
}

// log(1 + e^x). log(1 + e) = 2 artanh(e / (2 + e)), of which the series is cut where it is below half a unit.
FAST Floats softplus(Floats x) {
  Floats e = exp(choose(x < 0.0f, x, -x)), s = e / (2.0f + e), p = all(0.153846154f);
  for (float c : {0.181818182f, 0.222222222f, 0.285714286f, 0.4f, 0.666666667f, 2.0f}) p = fma(p, s * s, all(c));
  return fma(p, s, larger(x, Floats{}));
}

// The normal distribution function, by the error function's formula 7.1.26 of Abramowitz & Stegun. Error below 3e-7.
FAST Floats normal(Floats x) {
  Floats z = choose(x < 0.0f, -x, x) * 0.707106781f;
  Floats t = 1.0f / fma(z, all(0.3275911f), all(1.0f)), series = all(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) series = fma(series, t, all(c));
  Floats tail = 0.5f * series * t * exp(-(z * z));
  return choose(x < 0.0f, tail, 1.0f - tail);
}

// While it lives, the sums of products in this thread are formed as the instructions for bfloat16 do it. Compilers know
// nothing of this mode: `settle` keeps what goes in and what comes out on its side of it.
struct Unchanged {
  FAST Unchanged() {}
};
struct Flushed {
  FAST Flushed() : before(mode()) {
    set_mode(before | FLUSHED);
#ifdef __aarch64__
    asm volatile("msr fpsr, xzr" ::: "memory");
#endif
  }
  FAST ~Flushed() { set_mode(before); }
  Flushed(const Flushed&) = delete;
  Flushed& operator=(const Flushed&) = delete;

#ifdef __aarch64__
  // Has a result been flushed? ARM's processors look at it before they round it, those instructions after that: they
  // spare what is rounded up to the smallest normal number.
  FAST bool some() const {
    uint64_t status;
    asm volatile("mrs %0, fpsr" : "=r"(status)::"memory");
    return status & 8;
  }
#endif

 private:
  const decltype(mode()) before;
};

// Sums that are complete before what comes next, such as another mode.
template <class P, class V>
FAST void settle(V& sums) {
  if constexpr (std::is_same_v<P, Unchanged>) return;
  else if constexpr (std::is_array_v<V>)
    for (auto& each : sums) settle<P>(each);
  else IN_REGISTER(sums);
}

// loop(T{}) adds products to sums, which are zeros or settled, in T's mode. Where that mode is not exact enough, which
// is rare, it is done again from the start, slowly: loop(T::Exact{}).
template <class T, class V, class F>
FAST void products(V& sums, const F& loop) {
  using Mode = typename T::Products;
  constexpr bool ROUGH = requires(const Mode& m) { m.some(); };
  V before;
  if constexpr (ROUGH) std::memcpy(&before, &sums, sizeof sums);
  bool again = false;
  {
    const Mode mode;
    loop(T{});
    settle<Mode>(sums);
    if constexpr (ROUGH) again = mode.some();
  }
  if constexpr (ROUGH) {
    if (!again) return;
    std::memcpy(&sums, &before, sizeof sums);
    loop(typename T::Exact{});
  }
}

// a * b + c as instructions for bfloat16 form it, in the standard mode.
FAST Part flushed_fma(Part a, Part b, Part c) {
  const auto magnitude = [](Part v) { return (Part)((PartWords)v & 0x7fffffffu); };
  const auto sign = [](Part v) { return (Part)((PartWords)v & 0x80000000u); };
  const auto normal = [&](Part v) { return magnitude(v) < 0x1p-126f ? sign(v) : v; };
  a = normal(a), b = normal(b), c = normal(c);
  // The second is rounded as if exponents had no end. It may overflow, but then the first is large, or exact.
  const Part v = fma(a, b, c), scaled = fma(a * 0x1p64f, b, c * 0x1p64f);
  return (magnitude(v) <= 0x1p-126f) & (magnitude(scaled) < 0x1p-62f) ? sign(v) : v;
}

// float32.
struct F32 {
  using Element = float;
  using Lane = float;
  using Bits = uint32_t;
  using Wide = Part;  // lanes of a weight as they are multiplied, of one register
  using Products = Unchanged;
  static constexpr int DEPTH = 1;               // elements in a lane
  static constexpr Bits EXPONENT = 0x7f800000;  // all ones in infinity and NaN
  static FAST Element nan() { return std::numeric_limits<float>::quiet_NaN(); }

  static FAST Wide wide(PartWords w) { return (Part)w; }
  static FAST Part multiply(Part sums, Wide w, Lane x) { return fma(w, Part{} + x, sums); }
  static FAST Floats read(const Element* p) { return load<Floats>(p); }
  static FAST void write(Element* p, Floats v) { store(p, same_nan(v)); }
  static FAST void put(Element* p, Floats v) { store(p, v); }  // a NaN as it is
  static FAST Floats rounded(Floats v) { return v; }

  // Weights of attention, from 0 to 1: e^x, how they are stored, and those of one position of each lane as lanes.
  static constexpr Lane ONE = 1.0f;
  static FAST Floats weight(Floats x) { return exp(x); }
  static FAST void keep(Element* p, Floats w) { put(p, w); }
  static FAST Words together(const Floats (&w)[DEPTH]) { return (Words)w[0]; }
};

// bfloat16, as its 16 bits; sums are float32. The second of a pair is added first, and numbers that are denormal are
// zero, before a product and after it: so the instructions that multiply bfloat16 do it, see `Flushed`.
struct Bf16 {
  using Element = uint16_t;
  typedef uint32_t Lane __attribute__((aligned(2), may_alias));  // two elements, wherever they lie
  using Bits = uint16_t;
  static constexpr int DEPTH = 2;
  static constexpr Bits EXPONENT = 0x7f80;
  static FAST Element nan() { return 0x7fc0; }

#ifdef __AVX512BF16__
  using Wide = PartWords;
  using Products = Unchanged;
  static FAST Wide wide(PartWords w) { return w; }
  static FAST Part multiply(Part sums, Wide w, Lane x) {
    return (Part)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)(PartWords{} + x));
  }
#else
  struct Wide {
    Part first, second;
  };
  using Products = Flushed;
  static FAST Wide wide(PartWords w) { return {(Part)(w << 16), (Part)(w & 0xffff0000u)}; }
  static FAST Part multiply(Part sums, const Wide& w, Lane x) {
    const PartWords both = PartWords{} + x;
    sums = fma(w.second, (Part)(both & 0xffff0000u), sums);
    return fma(w.first, (Part)(both << 16), sums);
  }
  struct Exact;
#endif

  static FAST Floats read(const Element* p) { return (Floats)(read_halves(p) << 16); }
  static FAST void write(Element* p, Floats v) { write_halves(p, bits(v)); }
  static FAST void put(Element* p, Floats v) { write(p, v); }
  static FAST Floats rounded(Floats v) { return (Floats)(bits(v) << 16); }

  static constexpr Lane ONE = 0x3f803f80;  // twice
  static FAST Floats weight(Floats x) { return exp_near(x); }
#ifdef __AVX512BF16__  // they flush what is denormal, which no weight is
  static FAST void keep(Element* p, Floats w) { store(p, _mm512_cvtneps_pbh((__m512)w)); }
  static FAST Words together(const Floats (&w)[DEPTH]) {
    alignas(64) static constexpr uint16_t order[2 * LANES] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                              21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                              11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]);
    return (Words)_mm512_permutexvar_epi16(load<__m512i>(order), (__m512i)both);
  }
#else
  static FAST void keep(Element* p, Floats w) { write(p, w); }
  static FAST Words together(const Floats (&w)[DEPTH]) { return bits(w[0]) | bits(w[1]) << 16; }
#endif

  static FAST Words bits(Floats v) {  // to the nearest, ties to even
    Words w = (Words)v;
    Words near = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    return choose(v != v, Words{} + 0x7fc0u, near);
  }
};

#ifndef __AVX512BF16__
struct Bf16::Exact : Bf16 {
  using Products = Unchanged;
  static FAST Part multiply(Part sums, const Wide& w, Lane x) {
    const PartWords both = PartWords{} + x;
    sums = flushed_fma(w.second, (Part)(both & 0xffff0000u), sums);
    return flushed_fma(w.first, (Part)(both << 16), sums);
  }
};
#endif

// The first n lanes of a row's end, zeros after them; and the way back.
template <class T>
FAST Floats read_some(const typename T::Element* p, int n) {
  if (n >= LANES) return T::read(p);
  typename T::Element some[LANES] = {};
  std::memcpy(some, p, n * sizeof *p);
  return T::read(some);
}

template <class T>
FAST void write_some(typename T::Element* p, Floats v, int n) {
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
