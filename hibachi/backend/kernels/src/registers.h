// Sixteen lanes of 32 bits, in the registers of the machine.
//
// A vector of the compiler's may be wider than a register. But then g++ compares and chooses lane by lane, and keeps it
// in memory from one turn of a loop to the next, which takes up to fourteen times as long. So for g++ sixteen lanes are
// several vectors where registers are smaller. What is added in which order is a matter of the sixteen lanes alone.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define AVX512
#endif
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// What a compiler may not move beyond this place.
#if defined(__x86_64__) || defined(_M_X64)
#define IN_REGISTER(v) asm volatile("" : "+v"(v))
#else
#define IN_REGISTER(v) asm volatile("" : "+w"(v))
#endif

// For what works on lanes: called, it would be given them in memory.
#define FAST inline __attribute__((always_inline))

namespace hibachi {

// How this thread rounds and what it makes of denormals. STANDARD: to the nearest, and what they are. FLUSHED: zeros,
// as input and as output. HAPPENED: bits that operations leave there.
#if defined(__x86_64__) || defined(_M_X64)
constexpr uint32_t STANDARD = 0x1f80, FLUSHED = 0x8040, HAPPENED = 0x3f;
FAST uint32_t mode() {
  uint32_t m;
  asm volatile("stmxcsr %0" : "=m"(m));
  return m;
}
FAST void set_mode(uint32_t m) { asm volatile("ldmxcsr %0" ::"m"(m) : "memory"); }
#else
constexpr uint64_t STANDARD = 0, FLUSHED = 1 << 24, HAPPENED = 0;
FAST uint64_t mode() {
  uint64_t m;
  asm volatile("mrs %0, fpcr" : "=r"(m));
  return m;
}
FAST void set_mode(uint64_t m) { asm volatile("msr fpcr, %0" ::"r"(m) : "memory"); }
#endif

// While it lives, this thread computes in the standard mode, whatever others have told it.
class Standard {
 public:
  Standard() : before(mode()), other((before & ~HAPPENED) != STANDARD) {
    if (other) set_mode(STANDARD);
  }
  ~Standard() {
    if (other) set_mode(before);
  }
  Standard(const Standard&) = delete;
  Standard& operator=(const Standard&) = delete;

 private:
  const decltype(mode()) before;
  const bool other;
};

constexpr int LANES = 16;

// What fits into a register: 16, 8 or 4 lanes. The innermost loops are written with these.
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
FAST V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
FAST void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// a * b + c, rounded once.
FAST Part fma(Part a, Part b, Part c) {
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

// float16 in the lower half of lanes. Numbers below 2^-14 have no leading one, and infinity and NaN the largest
// exponent.
FAST Part from_halves(PartWords h) {
#ifdef AVX512
  return (Part)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h));
#else
  const PartWords size = h & 0x7fffu;
  const Part small = __builtin_convertvector((PartInts)size, Part) * 5.9604644775390625e-8f;  // 2^-24
  const PartWords large =
      (size << 13) + ((PartInts)size < 0x7c00 ? PartWords{} + (112u << 23) : PartWords{} + (224u << 23));
  return (Part)(((PartInts)size < 0x400 ? (PartWords)small : large) | (h & 0x8000u) << 16);
#endif
}

#if defined(AVX512) || defined(__clang__)
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

// Of each lane `yes` where the comparison `which` holds, else `no`.
template <class V>
FAST V choose(Ints which, V yes, V no) {
  return which ? yes : no;
}

// The same numbers, of another type.
template <class To, class V>
FAST To converted(V v) {
  return __builtin_convertvector(v, To);
}

// Sixteen numbers of 16 bits as 32, and the lower 16 or 8 bits of lanes.
#ifdef AVX512  // where compilers split it into halves
FAST Words read_halves(const uint16_t* p) { return (Words)_mm512_cvtepu16_epi32(load<__m256i>(p)); }
FAST void write_halves(uint16_t* p, Words v) { store(p, _mm512_cvtepi32_epi16((__m512i)v)); }
FAST void write_bytes(int8_t* p, Ints v) { store(p, _mm512_cvtepi32_epi8((__m512i)v)); }
#else
FAST Floats fma(Floats a, Floats b, Floats c) {
  Part x[PARTS], y[PARTS], z[PARTS];
  store(x, a), store(y, b), store(z, c);
  for (int i = 0; i < PARTS; i++) z[i] = fma(x[i], y[i], z[i]);
  return load<Floats>(z);
}

typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
FAST Words read_halves(const uint16_t* p) { return converted<Words>(load<Halves>(p)); }
FAST void write_halves(uint16_t* p, Words v) { store(p, converted<Halves>(v)); }
FAST void write_bytes(int8_t* p, Ints v) { store(p, converted<Bytes>(v)); }
#endif

#else

// As a vector of the compiler's is: one number stands for sixteen, a comparison gives -1 where it holds, and a cast to
// another type keeps the bits. Copied whole, it would go through memory in other pieces than it is read again.
template <class P>
struct Sixteen {
  using Lane = std::remove_cvref_t<decltype(P{}[0])>;

  P part[PARTS];

  Sixteen() = default;
  FAST Sixteen(Lane each) {
    for (P& p : part) p = each - P{};  // each + P{} would make 0 of -0
  }

  FAST Lane operator[](int i) const { return part[i / PART][i % PART]; }

  template <class Q>
  FAST explicit operator Sixteen<Q>() const {
    Sixteen<Q> same;
    for (int i = 0; i < PARTS; i++) same.part[i] = (Q)part[i];
    return same;
  }

  FAST Sixteen operator-() const {
    Sixteen v;
    for (int i = 0; i < PARTS; i++) v.part[i] = -part[i];
    return v;
  }

#define OPERATOR(op)                                                    \
  friend FAST Sixteen operator op(Sixteen a, Sixteen b) {               \
    for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] op b.part[i]; \
    return a;                                                           \
  }                                                                     \
  friend FAST Sixteen& operator op## = (Sixteen & a, Sixteen b) { return a = a op b; }
  OPERATOR(+)
  OPERATOR(-)
  OPERATOR(*)
  OPERATOR(/)
  OPERATOR(&)
  OPERATOR(|)
  OPERATOR(<<)
  OPERATOR(>>)
#undef OPERATOR

#define COMPARISON(op)                                                      \
  friend FAST Sixteen<PartInts> operator op(Sixteen a, Sixteen b) {         \
    Sixteen<PartInts> holds;                                                \
    for (int i = 0; i < PARTS; i++) holds.part[i] = a.part[i] op b.part[i]; \
    return holds;                                                           \
  }
  COMPARISON(<)
  COMPARISON(>)
  COMPARISON(<=)
  COMPARISON(>=)
  COMPARISON(==)
  COMPARISON(!=)
#undef COMPARISON
};

using Floats = Sixteen<Part>;
using Ints = Sixteen<PartInts>;
using Words = Sixteen<PartWords>;

template <class V>
  requires requires(V v) { v.part; }
FAST V load(const void* p) {
  V v;
  for (int i = 0; i < PARTS; i++) std::memcpy(&v.part[i], static_cast<const char*>(p) + 4 * PART * i, 4 * PART);
  return v;
}

template <class P>
FAST void store(void* p, Sixteen<P> v) {
  for (int i = 0; i < PARTS; i++) std::memcpy(static_cast<char*>(p) + 4 * PART * i, &v.part[i], 4 * PART);
}

FAST Floats fma(Floats a, Floats b, Floats c) {
  for (int i = 0; i < PARTS; i++) c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return c;
}

template <class P>
FAST Sixteen<P> choose(Ints which, Sixteen<P> yes, Sixteen<P> no) {
  for (int i = 0; i < PARTS; i++) yes.part[i] = which.part[i] ? yes.part[i] : no.part[i];
  return yes;
}

template <class To, class P>
FAST To converted(Sixteen<P> v) {
  To numbers;
  for (int i = 0; i < PARTS; i++)
    numbers.part[i] = __builtin_convertvector(v.part[i], std::remove_reference_t<decltype(numbers.part[i])>);
  return numbers;
}

typedef uint16_t Halves __attribute__((vector_size(2 * PART)));

FAST Words read_halves(const uint16_t* p) {
  Words v;
  for (int i = 0; i < PARTS; i++) v.part[i] = __builtin_convertvector(load<Halves>(p + i * PART), PartWords);
  return v;
}

FAST void write_halves(uint16_t* p, Words v) {
  for (int i = 0; i < PARTS; i++) store(p + i * PART, __builtin_convertvector(v.part[i], Halves));
}

FAST void write_bytes(int8_t* p, Ints v) {
  typedef int8_t Bytes __attribute__((vector_size(PART)));
  for (int i = 0; i < PARTS; i++) store(p + i * PART, __builtin_convertvector(v.part[i], Bytes));
}
#endif

}  // namespace hibachi
