// What processes of one host, the ranks of a group, give each other through memory that all of them have mapped.
//
// They take turns, all the same ones. In each, a rank writes a piece of what it has into a slot, then the turn's
// number, and reads the others' slots when they have that number. Who has come to the next turn has read all of this
// one, so two slots of each rank are enough.

#pragma once

#include "lanes.h"
#include "system.h"
#include "team.h"

namespace hibachi {

constexpr int64_t SLOT = 1 << 18;  // bytes of a slot: what a second cache holds of all of them
constexpr int MOST_RANKS = 128;

enum : int { MET, ENDED, LATE };

// What lies at the start of the memory; the slots come after it.
struct Shared {
  struct alignas(64) Turn {
    uint64_t number;
  };
  Turn ended;  // turns up to this one are not waited for any more
  Turn turns[MOST_RANKS];

  char* slot(int rank, uint64_t turn) { return reinterpret_cast<char*>(this + 1) + (2 * rank + turn % 2) * SLOT; }
};

// Ranks `first` to before `end`, one of which is `mine`, after turn `last`. awake: seconds in which who waits for
// others does not sleep. patience: seconds that one may be late.
struct RankExchange {
  Shared* shared;
  int32_t first, end, mine;
  uint64_t last;
  double awake, patience;

  // Give `bytes` bytes of x; null: nothing is read of them. read(at, some, turn) is called for each piece when all have
  // given theirs.
  template <class F>
  int give(const char* x, int64_t bytes, F read) {
    for (int64_t at = 0; at < bytes; at += SLOT) {
      const int64_t some = std::min(SLOT, bytes - at);
      last++;
      if (x) std::memcpy(shared->slot(mine, last), x + at, some);
      __atomic_store_n(&shared->turns[mine].number, last, __ATOMIC_RELEASE);
      for (int rank = first; rank < end; rank++)
        if (const int met = wait(shared->turns[rank].number)) return met;
      read(at, some, last);
    }
    return MET;
  }

 private:
  int wait(const uint64_t& turn) const {
    double began = 0;
    for (uint32_t looks = 1; __atomic_load_n(&turn, __ATOMIC_ACQUIRE) < last; looks++) {
      pause();
      if (looks % 64) continue;
      const double at = now();
      if (!began) began = at;
      if (at - began > patience) return LATE;
      if (at - began >= awake) give_way();
      if (__atomic_load_n(&shared->ended.number, __ATOMIC_RELAXED) >= last) return ENDED;
    }
    return MET;
  }
};

// x [n] = the sum of all ranks' x in a turn, added as a tree of neighbours.
struct SumOfRanks {
  const RankExchange& exchange;
  uint64_t turn;
  float* x;
  int64_t n;
  static constexpr int64_t EACH = 4096;

  int64_t count() const { return up(n, EACH); }
  int64_t batch(int) const { return 4; }

  void operator()(int64_t i) const {
    Floats sums[MOST_RANKS];
    const int ranks = exchange.end - exchange.first;
    for (int64_t at = i * EACH; at < std::min(n, (i + 1) * EACH); at += LANES) {
      const int some = std::min<int64_t>(LANES, n - at);
      for (int r = 0; r < ranks; r++) {
        const char* part = exchange.shared->slot(exchange.first + r, turn);
        sums[r] = read_some<F32>(reinterpret_cast<const float*>(part) + at, some);
      }
      for (int apart = 1; apart < ranks; apart *= 2)
        for (int r = 0; r + apart < ranks; r += 2 * apart) sums[r] += sums[r + apart];
      write_some<F32>(x + at, sums[0], some);
    }
  }
};

}  // namespace hibachi
