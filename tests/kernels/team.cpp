// Several callers want the team at the same time, while somebody changes how many threads it may have. Operations of a
// job read what the ones before wrote; ThreadSanitizer looks on. Says whether all numbers are as expected.

#include "team.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "system.h"

using namespace hibachi;

constexpr int CALLERS = 3, OPERATIONS = 5, PARTS = 24;
constexpr double SECONDS = 8;  // in which planted races are found

static std::atomic<int64_t> helped{0};  // parts that were computed by others than the caller

struct Numbers {
  int64_t of[OPERATIONS + 1][PARTS];
};

static void run(const void* what, int64_t operation, int64_t begin, int64_t end, int thread) {
  auto& all = *static_cast<Numbers*>(const_cast<void*>(what));
  if (thread) helped.fetch_add(end - begin, std::memory_order_relaxed);  // which orders nothing
  for (int64_t i = begin; i < end; i++) {
    volatile int busy = 0;
    while (busy < 2000) busy = busy + 1;  // else the caller is done before others come
    all.of[operation + 1][i] = 2 * all.of[operation][i] + all.of[operation][(i + 1) % PARTS];
  }
}

static bool call(int caller) {
  const int64_t counts[OPERATIONS] = {PARTS, PARTS, PARTS, PARTS, PARTS}, batches[OPERATIONS] = {1, 3, 40, 1, 7};
  const double end = now() + SECONDS;
  for (int64_t j = 0; now() < end; j++) {
    Numbers* got = new Numbers();  // gone after the job, as in Python
    Numbers want{};
    for (int64_t i = 0; i < PARTS; i++) want.of[0][i] = got->of[0][i] = caller * 1000 + j + i;
    for (int64_t o = 0; o < OPERATIONS; o++)
      for (int64_t i = 0; i < PARTS; i++) want.of[o + 1][i] = 2 * want.of[o][i] + want.of[o][(i + 1) % PARTS];
    double seconds[OPERATIONS] = {};
    work({run, got, counts, batches, OPERATIONS, threads(), j % 2 ? seconds : nullptr});
    for (int64_t i = 0; i < PARTS; i++)
      if (got->of[OPERATIONS][i] != want.of[OPERATIONS][i]) return false;
    delete got;
  }
  return true;
}

int main() {
  std::atomic<bool> over{false};
  std::atomic<int> right{0};
  std::thread changes([&] {
    for (int n = 0; !over; n++) {
      set_threads(1 + n % 5);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  std::vector<std::thread> callers;
  for (int c = 0; c < CALLERS; c++) callers.emplace_back([&, c] { right += call(c); });
  for (auto& caller : callers) caller.join();
  over = true;
  changes.join();
  std::printf("%s; others computed %lld parts\n", right == CALLERS ? "as expected" : "wrong", (long long)helped);
  return right != CALLERS;
}
