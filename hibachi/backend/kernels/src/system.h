// What an operating system gives: a clock, threads, and places to wait.

#pragma once

#include <cstdint>
#include <cstdlib>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#endif

namespace hibachi {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// What a new thread begins with.
struct Start {
  void (*call)(void*);
  void* with;

  static Start* make(void (*call)(void*), void* with) {
    Start* s = static_cast<Start*>(std::malloc(sizeof(Start)));
    if (s) *s = {call, with};
    return s;
  }

  static void run(void* p) {
    const Start s = *static_cast<Start*>(p);
    std::free(p);
    s.call(s.with);
  }
};

#ifdef _WIN32

inline double now() {  // seconds
  LARGE_INTEGER ticks, each;
  QueryPerformanceCounter(&ticks);
  QueryPerformanceFrequency(&each);
  return double(ticks.QuadPart) / double(each.QuadPart);
}

inline void give_way() { Sleep(0); }

class Mutex {
 public:
  void lock() { AcquireSRWLockExclusive(&lock_); }
  bool try_lock() { return TryAcquireSRWLockExclusive(&lock_); }
  void unlock() { ReleaseSRWLockExclusive(&lock_); }

 private:
  friend class Condition;
  SRWLOCK lock_ = SRWLOCK_INIT;
};

class Condition {
 public:
  void wait(Mutex& m) { SleepConditionVariableSRW(&all, &m.lock_, INFINITE, 0); }
  void wake() { WakeAllConditionVariable(&all); }

 private:
  CONDITION_VARIABLE all = CONDITION_VARIABLE_INIT;
};

inline bool start_thread(void (*call)(void*), void* with) {
  Start* start = Start::make(call, with);
  if (!start) return false;
  LPTHREAD_START_ROUTINE run = [](void* p) -> DWORD { return Start::run(p), 0; };
  HANDLE thread = CreateThread(nullptr, 0, run, start, 0, nullptr);
  if (thread) CloseHandle(thread);
  else std::free(start);
  return thread != nullptr;
}

inline void after_fork(void (*)()) {}

#else

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Sleeps for a moment: a scheduler fetches somebody who waits for another processor to one that has nothing to do.
inline void give_way() {
  const timespec moment{0, 50000};
  nanosleep(&moment, nullptr);
}

class Mutex {
 public:
  void lock() { pthread_mutex_lock(&mutex); }
  bool try_lock() { return !pthread_mutex_trylock(&mutex); }
  void unlock() { pthread_mutex_unlock(&mutex); }

 private:
  friend class Condition;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
};

class Condition {
 public:
  void wait(Mutex& m) { pthread_cond_wait(&all, &m.mutex); }
  void wake() { pthread_cond_broadcast(&all); }

 private:
  pthread_cond_t all = PTHREAD_COND_INITIALIZER;
};

// Signals are for other threads: this one does not take them.
inline bool start_thread(void (*call)(void*), void* with) {
  Start* start = Start::make(call, with);
  if (!start) return false;
  void* (*run)(void*) = [](void* p) -> void* { return Start::run(p), nullptr; };
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  pthread_t thread;
  const bool made = !pthread_create(&thread, nullptr, run, start);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (made) pthread_detach(thread);
  else std::free(start);
  return made;
}

inline void after_fork(void (*call)()) { pthread_atfork(nullptr, nullptr, call); }

#endif

}  // namespace hibachi
