#include "team.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "registers.h"
#include "system.h"

namespace hibachi {

namespace {

constexpr double AWAKE = 200e-6;    // seconds that a thread looks for work after a job
constexpr double PATIENT = 5e-3;    // and in the middle of one
constexpr double STALLED = 200e-6;  // seconds that parts of others may take longer than the caller's own, before it
                                    // does without them and sleeps meanwhile
constexpr double ALONE = 20e-3,
                 MOST_ALONE = 2;  // seconds without a team that costs more than it does, doubled each time
constexpr double STRETCH = 5e-3;  // seconds of jobs that are looked at together; a long job has several
constexpr double MEMORY = 0.75;   // of what earlier stretches gained
constexpr int PAUSES = 64;        // between two looks at the clock

// Which operation is on, and its next part. Each operation has a turn of its own; CLOSED: no part can be taken.
constexpr int64_t CLOSED = 0xffffffff;
constexpr uint32_t turn_of(uint64_t ticket) { return uint32_t(ticket >> 32); }
constexpr int64_t next_of(uint64_t ticket) { return int64_t(ticket & CLOSED); }
constexpr uint64_t ticket_of(uint32_t turn, int64_t next) { return uint64_t(turn) << 32 | uint64_t(next); }

class Team {
 public:
  Mutex busy;  // held by the caller of `work`

  void work(const Job& j) {
    for (; size < j.threads; size++) {
      Member* m = static_cast<Member*>(std::malloc(sizeof(Member)));  // as long-lived as the thread
      if (!m || (*m = {this, size}, !start_thread(Member::run, m))) {
        std::free(m);
        break;
      }
    }
    job = j;
    members.store(j.threads, std::memory_order_relaxed);
    const double start = now();
    stopped.store(start < until, std::memory_order_relaxed);
    if (j.seconds) began = start;
    const uint32_t last = turn_of(ticket.load(std::memory_order_relaxed)) + uint32_t(j.operations) + 1;
    running.store(true, std::memory_order_relaxed);
    begin(0);
    call();
    lead(last, start);
    running.store(false, std::memory_order_relaxed);
  }

 private:
  struct Member {
    Team* team;
    int place;

    static void run(void* p) {
      const Member m = *static_cast<Member*>(p);
      std::free(p);
      m.team->serve(m.place);
    }
  };

  alignas(64) std::atomic<uint64_t> ticket{ticket_of(0, CLOSED)};
  alignas(64) std::atomic<int64_t> done{0};  // parts of the operation that is on
  alignas(64) std::atomic<int64_t> operation{0}, count{0}, batch{0};
  std::atomic<int> members{1};
  std::atomic<bool> stopped{false}, running{false};
  alignas(64) std::atomic<uint32_t> calls{0}, sleeping{0};
  Mutex door;
  Condition bell;
  Job job{};                            // read by who has a part, and by who opens an operation
  double began = 0;                     // the operation that is on
  double gain = 0.5;                    // of the seconds of a stretch, how many the team saves; below 0 it costs some
  double alone = ALONE / 2, until = 0;  // for how long the caller did last without the team, and until when
  int size = 1;                         // threads that were started, and the caller

  // Opens the next operation that has parts, from `i` on; or none, and from then on nothing of the job is read. The
  // ticket is closed: nobody takes a part.
  void begin(int64_t i) {
    uint32_t turn = turn_of(ticket.load(std::memory_order_relaxed)) + 1;
    for (; i < job.operations && !job.counts[i]; i++) turn++;
    if (i == job.operations) return ticket.store(ticket_of(turn, CLOSED), std::memory_order_release);
    operation.store(i, std::memory_order_relaxed);
    count.store(job.counts[i], std::memory_order_relaxed);
    batch.store(job.batches[i], std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    const bool shared = job.counts[i] > job.batches[i];
    ticket.store(ticket_of(turn, 0), std::memory_order_release);
    if (shared && sleeping.load(std::memory_order_relaxed)) call();  // who had nothing to do for long
  }

  // Wakes who sleeps. Who is about to sleep sees that there was a call.
  void call() {
    if (stopped.load(std::memory_order_relaxed)) return;
    calls.fetch_add(1);
    if (!sleeping.load()) return;
    door.lock();
    bell.wake();
    door.unlock();
  }

  // Takes parts, computes them, and opens the next operation if they were the last. false: there are none to take.
  bool take(int me, int64_t* mine = nullptr) {
    uint64_t t = ticket.load(std::memory_order_acquire);
    const int64_t i = operation.load(std::memory_order_relaxed), n = count.load(std::memory_order_relaxed);
    const int64_t first = next_of(t), end = std::min(n, first + batch.load(std::memory_order_relaxed));
    if (first >= n || me >= members.load(std::memory_order_relaxed)) return false;
    // If this succeeds, the turn is still that of t, so i, n and the batch belong to it.
    if (!ticket.compare_exchange_strong(t, ticket_of(turn_of(t), end), std::memory_order_acq_rel)) return true;
    job.run(job.what, i, first, end, me);
    if (mine) *mine += end - first;
    if (done.fetch_add(end - first, std::memory_order_acq_rel) + end - first == n) {
      if (job.seconds) {
        const double end = now();
        job.seconds[i] += end - began;
        began = end;
      }
      ticket.store(ticket_of(turn_of(t), CLOSED), std::memory_order_relaxed);
      begin(i + 1);
    }
    return true;
  }

  // What the caller does until the job is over. It counts the seconds that others save it, less those that it waits for
  // them.
  void lead(uint32_t last, double at) {
    double gained = 0, since = at;  // of a stretch
    double worked = 0;              // at the operation that is on
    int64_t mine = 0;               // parts of it
    for (;;) {
      const uint64_t before = ticket.load(std::memory_order_acquire);
      if (turn_of(before) == last) return look_back(gained, at - since, at);
      const int64_t all = count.load(std::memory_order_relaxed), some = batch.load(std::memory_order_relaxed);
      const bool alone_now = stopped.load(std::memory_order_relaxed);
      while (turn_of(ticket.load(std::memory_order_acquire)) == turn_of(before) && take(0, &mine)) {
      }
      const double then = now();
      worked += then - at;
      at = then;
      const double patience = STALLED + (mine ? worked / mine * std::min(some, mine) : 0);
      uint64_t seen;
      for (int n = 1; turn_of(seen = ticket.load(std::memory_order_acquire)) == turn_of(before); n++) {
        if (next_of(seen) < all) break;
        pause();
        if (n % PAUSES || now() - at < patience) continue;
        if (gained < now() - at) stop(now() - at);  // others begin no part for a while
        give_way();
      }
      const double end = now();
      if (!alone_now) gained -= end - at;
      at = end;
      if (turn_of(seen) == turn_of(before)) continue;
      if (mine) gained += worked / mine * (all - mine);
      worked = 0, mine = 0;
      if (at - since > STRETCH) {
        look_back(gained, at - since, at);
        gained = 0, since = at;
      }
      if (alone_now && at >= until) stopped.store(false, std::memory_order_relaxed);
    }
  }

  void stop(double seconds) {
    until = std::max(until, now() + seconds);
    stopped.store(true, std::memory_order_relaxed);
  }

  // At the end of a stretch.
  void look_back(double gained, double took, double end) {
    if (gained == 0) return;  // there were no others
    gain = MEMORY * gain + (1 - MEMORY) * gained / std::max(1e-9, took);
    if (gain < 0) {
      alone = std::min(MOST_ALONE, 2 * alone);
      stop(alone);
      gain = 0;
    } else if (gained > 0) {
      alone = std::max(ALONE / 2, alone / 2);
    }
  }

  void serve(int me) {
    const Standard mode;
    for (;;) {
      const uint32_t before = calls.load();
      double since = now();
      for (int n = 1;; n++) {
        if (!stopped.load(std::memory_order_relaxed) && take(me)) {
          n = 0;
          continue;
        }
        pause();
        if (n == PAUSES) since = now();
        else if (n % PAUSES == 0) {
          const double waited = now() - since;
          if (waited > (running.load(std::memory_order_relaxed) ? PATIENT : AWAKE)) break;
          if (waited > AWAKE) give_way();
        }
      }
      door.lock();
      sleeping.fetch_add(1);
      while (calls.load() == before) bell.wait(door);
      sleeping.fetch_sub(1);
      door.unlock();
    }
  }
};

std::atomic<Team*> team{nullptr};
std::atomic<int> wanted{1};
std::atomic<bool> watching{false};

// The team of this process, or nullptr if there is no memory. It is never freed: its threads outlive all else.
Team* ours() {
  Team* t = team.load(std::memory_order_acquire);
  if (t) return t;
  void* memory = std::malloc(sizeof(Team) + alignof(Team));
  if (!memory) return nullptr;
  const auto at = (reinterpret_cast<uintptr_t>(memory) + alignof(Team) - 1) & ~uintptr_t(alignof(Team) - 1);
  Team* made = new (reinterpret_cast<void*>(at)) Team;
  if (!team.compare_exchange_strong(t, made, std::memory_order_acq_rel)) return std::free(memory), t;
  // The threads are not there in a child: it makes a team of its own.
  if (!watching.exchange(true)) after_fork([] { team.store(nullptr); });
  return made;
}

void work_alone(const Job& job) {
  double began = job.seconds ? now() : 0;
  for (int64_t i = 0; i < job.operations; i++) {
    job.run(job.what, i, 0, job.counts[i], 0);
    if (!job.seconds) continue;
    const double end = now();
    job.seconds[i] += end - began;
    began = end;
  }
}

bool worth_sharing(const Job& job) {
  if (job.threads > 1)
    for (int64_t i = 0; i < job.operations; i++)
      if (job.counts[i] > job.batches[i]) return true;
  return false;
}

}  // namespace

int threads() { return wanted.load(std::memory_order_relaxed); }
void set_threads(int n) { wanted.store(std::max(1, n), std::memory_order_relaxed); }

void work(const Job& job) {
  const Standard mode;
  Team* t = worth_sharing(job) ? ours() : nullptr;
  if (!t || !t->busy.try_lock()) return work_alone(job);
  t->work(job);
  t->busy.unlock();
}

}  // namespace hibachi
