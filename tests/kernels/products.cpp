// Products of bfloat16 with numbers of all kinds, beside a model of the instruction VDPBF16PS in double and integers.
// Prints a digest of all sums, and how often a sum was one that processors treat differently: below the smallest normal
// number, but rounded up to it. Says which sum is another one than the model's.

#include <cstdio>
#include <vector>

#include "linear.h"
#include "pack.h"

using namespace hibachi;

constexpr int ROUNDS = 3000, M = 11, N = 50, K = 6;

static uint64_t state = 1;
static int drawn(int below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return int((state >> 33) % below);
}

static int64_t spared = 0;

// a * b + c, where a and b are bfloat16, rounded once; what is denormal is zero, before and after rounding to 24 bits.
static float model(float a, float b, float c) {
  for (float* each : {&a, &b, &c})
    if (std::fabs(*each) < 0x1p-126f) *each = std::copysign(0.0f, *each);
  const double product = double(a) * b, sum = product + c;  // the product is exact
  if (!(std::fabs(sum) <= 0x1p200) || sum == 0) return sum;
  const double back = sum - product, lost = (product - (sum - back)) + (c - back);  // Knuth's: sum + lost is exact
  int64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  if (lost != 0 && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;  // to odd: so what follows rounds but once
  bits = (bits + 0xfffffff + (bits >> 29 & 1)) & ~int64_t(0x1fffffff);
  double rounded;
  std::memcpy(&rounded, &bits, sizeof bits);
  spared += std::fabs(rounded) == 0x1p-126 && (std::fabs(sum) < 0x1p-126 || (sum > 0 ? lost < 0 : lost > 0));
  return std::fabs(rounded) < 0x1p-126 ? std::copysign(0.0f, float(sum)) : float(rounded);
}

static float number(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

static uint16_t near(int exponent) {  // a number of either sign; most are powers of two
  const int most = drawn(4) ? 0 : drawn(3) ? drawn(4) * 42 : drawn(128);
  return drawn(2) << 15 | std::min(254, std::max(0, exponent + 127)) << 7 | most;
}

template <class T>
static bool same(const std::vector<uint16_t>& x, const std::vector<uint16_t>& w, const std::vector<float>& want) {
  std::vector<uint16_t> memory(2 * WIDTH * K + 32);
  uint16_t* packed = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
  const pack::Pack<pack::Plain<Bf16>, pack::Rounded<Bf16>> pack{
      .rows = (const char*)w.data(), .packed = (uint32_t*)packed, .many = N, .n = N, .k = K
  };
  std::vector<char> scratch(pack.scratch());
  for (int64_t p = 0; p < pack.count(); p++) pack(p, scratch.data());
  std::vector<float> y(M * N);
  const Linear<T, F32> linear{
      .factors = Factors<T>(x.data(), K, M, K).of(0, packed, nullptr),
      .bias = nullptr,
      .y = y.data(),
      .y_stride = N,
      .m = M,
      .n = N,
      .k = K
  };
  for (int64_t p = 0; p < linear.count(); p++) linear(p);
  for (int i = 0; i < M * N; i++)
    if (std::memcmp(&y[i], &want[i], sizeof y[i]) && (y[i] == y[i] || want[i] == want[i])) {
      std::printf("%a instead of %a:", y[i], want[i]);
      for (int k = 0; k < K; k++) std::printf(" %a * %a", number(x[i / N * K + k]), number(w[i % N * K + k]));
      std::printf("\n");
      return false;
    }
  return true;
}

int main() {
  uint64_t digest = 0;
  std::vector<uint16_t> x(M * K), w(N * K);
  std::vector<float> want(M * N);
  for (int round = 0; round < ROUNDS; round++) {
    const int large = -126 + drawn(26), kind = drawn(3);
    for (int k = 0; k < K; k++) {
      const int ends[] = {-126, -127, -125, -149 - drawn(4), large, large};
      const int product = ends[drawn(6)], first = -126 + drawn(128);
      for (int i = k; i < M * K; i += K) x[i] = kind ? near(first) : drawn(1 << 16);
      for (int i = k; i < N * K; i += K) w[i] = kind ? near(product - first) : drawn(1 << 16);
      if (k > 1 && kind < 2)  // few terms, of which none hides the others
        for (int i = k; i < M * K; i += K) x[i] = 0;
    }
    for (int i = 0; i < M * N; i++) {
      float sum = 0;
      for (int k = 0; k < K; k += 2)
        for (int j : {k + 1, k}) sum = model(number(x[i / N * K + j]), number(w[i % N * K + j]), sum);
      uint32_t bits;
      std::memcpy(&bits, &sum, sizeof bits);
      digest = (digest ^ (sum == sum ? bits : 0)) * 1099511628211u;
      want[i] = sum;
    }
    if (!same<Bf16>(x, w, want)) return 1;
#ifndef __AVX512BF16__
    if (!same<Bf16::Exact>(x, w, want)) return 2;
#endif
  }
  std::printf("%016llx %lld\n", (unsigned long long)digest, (long long)spared);
}
