// What the processor offers, and the system lets us use. Built for the plainest processor, so that it runs on any.

#include <stdint.h>

#ifdef _WIN32
__declspec(dllexport)
#else
__attribute__((visibility("default")))
#endif
// 0: none of the variants, 1: avx2, 2: avx512, 3: avx512bf16, see build.py.
int hibachi_level(void) {
#if defined(__x86_64__) || defined(_M_X64)
  uint32_t a, b, c, d;
#define ASK(leaf, sub) __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(leaf), "2"(sub))
#define HAS(found, bits) (((found) & (bits)) == (bits))
  ASK(0, 0);
  if (a < 7) return 0;
  ASK(1, 0);
  if (!HAS(c, 1u << 12 | 1u << 22 | 1u << 23 | 1u << 27 | 1u << 28 | 1u << 29))
    return 0;            // fma movbe popcnt osxsave avx f16c
  uint32_t saved, high;  // registers that the system keeps for each thread
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!HAS(saved, 0x6u)) return 0;
  ASK(0x80000001u, 0);
  if (!HAS(c, 1u << 5)) return 0;  // lzcnt
  ASK(7, 0);
  if (!HAS(b, 1u << 3 | 1u << 5 | 1u << 8)) return 0;                                                 // bmi1 avx2 bmi2
  if (!HAS(saved, 0xe6u) || !HAS(b, 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31)) return 1;  // f dq cd bw vl
  if (!HAS(c, 1u << 11)) return 1;                                                                    // vnni
  if (a < 1) return 2;
  ASK(7, 1);
  return HAS(a, 1u << 5) ? 3 : 2;  // bf16
#else
  return 0;
#endif
}
