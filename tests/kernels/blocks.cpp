// Products of weights in blocks, and rows of them, of matrices of odd shapes that are rounded here. Prints a digest.

#include <cstdio>
#include <vector>

#include "pack.h"

using namespace hibachi;

static uint64_t state = 1, digest = 0;
static int drawn(int below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return int((state >> 33) % below);
}

static std::vector<float> numbers(int64_t n) {  // a few far smaller or larger than the others
  std::vector<float> v(n);
  for (float& f : v) f = float(drawn(20001) - 10000) * (drawn(50) ? 1e-4f : drawn(2) ? 1e-10f : 20.0f);
  return v;
}

static void add(const std::vector<float>& v) {
  for (const float& f : v) digest = (digest ^ load<uint32_t>(&f)) * 1099511628211u;
}

template <class Kind>
static void compute(int64_t m, int64_t n, int64_t k) {
  const std::vector<float> w = numbers(n * k), x = numbers(m * k);
  const Buffer<uint32_t> packed(up(n, WIDTH) * WIDTH * blocks::depth<Kind>(k));
  const pack::Pack<pack::Plain<F32>, pack::Blocks<Kind>> pack{
      .rows = (const char*)w.data(), .packed = packed.data(), .many = n, .n = n, .k = k
  };
  const Buffer<char> scratch(pack.scratch()), memory(int8::Rounded::bytes(m, k));
  for (int64_t p = 0; p < pack.count(); p++) pack(p, scratch.data());
  const int8::Rounded rounded(memory.data(), m, k);
  for (int64_t i = 0; i < m; i++) rounded.round<F32>(i, x.data() + i * k, k);
  std::vector<float> y(m * n), rows(n * k);
  const auto factors = blocks::Factors<Kind>(memory.data(), 0, m, k).of(0, packed.data(), nullptr);
  const Linear<F32, F32, blocks::Factors<Kind>> linear{
      .factors = factors, .bias = nullptr, .y = y.data(), .y_stride = n, .m = m, .n = n, .k = k
  };
  for (int64_t p = 0; p < linear.count(); p++) linear(p);
  std::vector<int32_t> at(n);
  for (int64_t i = 0; i < n; i++) at[i] = i;
  const blocks::Rows<F32, Kind> all{packed.data(), at.data(), rows.data(), n, k};
  for (int64_t i = 0; i < n; i++) all(i);
  add(y), add(rows);
}

int main() {
  const int64_t shapes[][3] = {
      {1, 1, 1}, {2, 47, 3}, {7, 49, 65}, {8, 48, 64}, {9, 200, 127}, {3, 1, 577}, {5, 96, 192}
  };
  for (auto [m, n, k] : shapes) compute<blocks::Four>(m, n, k), compute<blocks::Eight>(m, n, k);
  std::printf("%016llx\n", (unsigned long long)digest);
}
