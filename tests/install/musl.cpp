// Products, an activation and draws by a library of kernels, with a team of threads; prints a digest of all bits.
//
// It is for a C library that has no Python here, so it needs nothing but that.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "api.h"

static uint64_t digest = 1469598103934665603u, state = 1;

static float number() {  // between -1 and 1
  state = state * 6364136223846793005u + 1442695040888963407u;
  return float(int32_t(state >> 33) - (1 << 30)) / float(1 << 30);
}

template <class T>
static T* filled(int64_t n, float scale) {
  T* made = static_cast<T*>(malloc(n * sizeof(T)));
  for (int64_t i = 0; i < n; i++) {
    union {
      float f;
      uint32_t u;
    } x = {scale * number()};
    made[i] = sizeof(T) == 4 ? T(x.f) : T(x.u >> 16);
  }
  return made;
}

static void add(const void* p, int64_t bytes) {  // FNV-1a
  for (int64_t i = 0; i < bytes; i++) digest = (digest ^ static_cast<const uint8_t*>(p)[i]) * 1099511628211u;
}

static void* library;

template <class F>
static F* found(const char* name) {
  void* p = dlsym(library, name);
  if (!p) exit((puts(dlerror()), 3));
  return reinterpret_cast<F*>(p);
}

// As in operations.cpp.
static_assert(ABI == 8, "another interface: are these as they were?");
using In = const void*;
using Size = int64_t;
static const auto packed_size = [] { return found<Size(int, Size, Size)>("hibachi_packed"); };
static const auto pack = [] {
  return found<int(int, int, In, In, void*, void*, Size, Size, Size, Size)>("hibachi_pack");
};
static const auto linear = [] {
  return found<int(int, int, int, In, Size, In, In, In, void*, Size, Size, Size)>("hibachi_linear");
};
static const auto activate = [] { return found<int(int, int, In, Size, void*, Size, Size, int)>("hibachi_activate"); };
static const auto softmax = [] { return found<int(int, In, void*, Size, Size)>("hibachi_softmax"); };
struct How {  // as in draw.h
  In temperature, top_k, top_p, min_p, typical_p, u;
};
static const auto draw = [] { return found<int(In, Size, Size, const How*, void*, void*)>("hibachi_draw"); };
static const auto set_threads = [] { return found<void(int)>("hibachi_set_threads"); };

template <class T>
static int layer(int dtype) {
  constexpr int64_t M = 37, N = 500, K = 300;
  T *x = filled<T>(M * K, 2), *w = filled<T>(N * K, 1), *b = filled<T>(N, 1);
  T *y = filled<T>(M * N, 0), *z = filled<T>(M * N, 0);
  void* packed = aligned_alloc(64, (packed_size()(dtype, N, K) + 63) / 64 * 64);
  int failed = pack()(dtype, dtype, w, nullptr, packed, nullptr, 0, N, N, K);
  failed |= linear()(dtype, dtype, 0, x, K, packed, nullptr, b, y, M, N, K);
  add(y, M * N * sizeof(T));
  failed |= activate()(dtype, 0, y, N, z, M, N, 0);
  add(z, M * N * sizeof(T));
  failed |= softmax()(dtype, y, z, M, N);
  add(z, M * N * sizeof(T));
  return failed;
}

static int draws() {
  constexpr int64_t ROWS = 200, COLUMNS = 3000;
  float *x = filled<float>(ROWS * COLUMNS, 9), temperature[ROWS], p[ROWS], none[ROWS], zero[ROWS], u[ROWS], most[ROWS];
  int32_t k[ROWS], token[ROWS];
  for (int64_t i = 0; i < ROWS; i++) {
    temperature[i] = i % 3 * 0.7f, k[i] = i % 5 ? 0 : 40, p[i] = i % 4 ? 1 : 0.9f;
    none[i] = 1, zero[i] = 0, u[i] = 0.5f + 0.49f * number();
  }
  const How how = {temperature, k, p, zero, none, u};
  const int failed = draw()(x, ROWS, COLUMNS, &how, token, most);
  add(token, sizeof token), add(most, sizeof most);
  return failed;
}

int main(int, char** arguments) {
  if (!(library = dlopen(arguments[1], RTLD_NOW))) return puts(dlerror()), 2;
  int failed = 0;
  for (int threads = 1; threads <= 4; threads += 3) {
    set_threads()(threads);
    for (int again = 0; again < 50; again++) {
      state = 1;
      failed |= layer<float>(0) | layer<uint16_t>(1) | draws();
    }
    printf("%016llx\n", static_cast<unsigned long long>(digest));
    digest = 1469598103934665603u;
  }
  return failed;
}
