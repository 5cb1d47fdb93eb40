// The worker threads. One job at a time; a caller that finds the pool busy does its own work alone, so that many Python
// threads never make more runnable threads than cores.
//
// Where torch runs on OpenMP, its own threads do the work. They spin for milliseconds after each of torch's ops, and other
// threads would have to take the cores from them: what follows such an op would be done by its caller alone, nearly. Each
// calling thread has such a team of its own, so only one may have it spin for us: whoever called last, until it has not
// called for a while. The others, and a forked child, in which a team's threads are missing, have our own workers: they are
// made when first needed and sleep on a futex after a short spin; after a fork the child starts with none.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "lz.hpp"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Symbols of the oldest C library we support: a newer one at build time must not raise the floor.
#if defined(__GLIBC__) && !defined(LZ_SANITIZED)
#if defined(__x86_64__)
#define LZ_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__aarch64__)
#define LZ_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
#endif
#ifdef LZ_OLD
LZ_OLD(pthread_create);
LZ_OLD(pthread_key_create);
LZ_OLD(pthread_setspecific);
#endif

namespace lz {

const char RELAYOUT[] = "relayout";

namespace {

constexpr int MOST = 255;
// About the gap between two kernels of a decode step; longer where Python or torch is between them, and then whoever else
// wants the core goes first.
#ifndef LZ_SPIN_NS
#define LZ_SPIN_NS 30000
#endif
#ifndef LZ_YIELD_NS
#define LZ_YIELD_NS 90000
#endif
constexpr int64_t TEAM_KEPT_NS = 100000000;  // another caller gets the team after this long

enum Word : uint32_t { IDLE, POSTED, RUNNING, SLEEPING };

struct alignas(128) Slot {
  uint32_t word;
};

struct Job {
  void (*body)(void*, int64_t);
  void* context;
  int64_t parts;
  int64_t shares;
};

// How many parts of a share are taken. Share s of n has the parts s, s + n, s + 2n, …: the order of the parts is kept.
struct alignas(64) Taken {
  int64_t count;
};

Slot slots[MOST];
alignas(128) Job job;
Taken taken[MOST + 1];
alignas(128) uint32_t busy;
uint32_t waiting;  // the caller sleeps until a worker is done
int made;
bool watched_forks;

// OpenMP's own entry, as the GNU runtime has it and the others offer it: (body, argument, threads, flags).
using StartTeam = void (*)(void (*)(void*), void*, unsigned, unsigned);
StartTeam start_team;
const void* team_caller;  // under `busy`, as is the next
int64_t team_used;
__thread char caller_mark;  // its address tells threads apart
int team_met;               // threads of teams that have worked here
__thread int team_number;   // 1, 2, …: this one's; 0: none yet

inline void pause_a_little() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

inline int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

#if defined(__linux__)
void sleep_on(uint32_t* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }
#else
void sleep_on(uint32_t* word, uint32_t value) {
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) {
    timespec t = {0, 50000};
    nanosleep(&t, nullptr);
  }
}
void wake(uint32_t*) {}
#endif

bool swap(uint32_t* word, uint32_t from, uint32_t to) {
  return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// Spin while the word has this value, for a while; false: it still has. The clock is looked at only after the first turns.
bool spin_while(uint32_t* word, uint32_t value) {
  int64_t begin = 0;
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) return true;
      pause_a_little();
    }
    int64_t t = now();
    if (begin == 0) begin = t;
    if (t - begin < LZ_SPIN_NS) continue;
    if (t - begin >= LZ_SPIN_NS + LZ_YIELD_NS) return false;
    sched_yield();
  }
}

// Each thread begins with a share of its own, the same in every job: what a part read and wrote the last time may still be in
// that core's cache. Whoever is done helps the others.
void take_parts(const Job& j, int64_t own) {
  for (int64_t i = 0; i < j.shares; ++i) {
    const int64_t share = (own + i) % j.shares;
    for (;;) {
      const int64_t part = share + j.shares * __atomic_fetch_add(&taken[share].count, 1, __ATOMIC_RELAXED);
      if (part >= j.parts) break;
      j.body(j.context, part);
    }
  }
}

void* work(void* given) {
  Slot* slot = static_cast<Slot*>(given);
  for (;;) {
    if (!spin_while(&slot->word, IDLE) && swap(&slot->word, IDLE, SLEEPING)) {
      while (__atomic_load_n(&slot->word, __ATOMIC_ACQUIRE) == SLEEPING) sleep_on(&slot->word, SLEEPING);
    }
    if (!swap(&slot->word, POSTED, RUNNING)) continue;
    take_parts(job, 1 + (slot - slots));
    __atomic_store_n(&slot->word, IDLE, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&waiting, __ATOMIC_SEQ_CST)) wake(&slot->word);
  }
  return nullptr;
}

void team_body(void*) {
  if (&caller_mark == team_caller) return take_parts(job, 0);
  if (team_number == 0) team_number = __atomic_add_fetch(&team_met, 1, __ATOMIC_RELAXED);
  take_parts(job, 1 + (team_number - 1) % (job.shares - 1));
}

bool gets_team() {
  if (start_team == nullptr) return false;
  if (team_caller != &caller_mark) {
    if (team_caller != nullptr && now() - team_used < TEAM_KEPT_NS) return false;
    team_caller = &caller_mark;
  }
  return true;
}

void forked() {  // only the forking thread is left
  start_team = nullptr;
  made = 0;
  busy = 0;
  waiting = 0;
  for (Slot& slot : slots) slot.word = IDLE;
}

void watch_forks() {
  if (watched_forks) return;
  pthread_atfork(nullptr, nullptr, forked);
  watched_forks = true;
}

void make_workers(int wanted) {
  watch_forks();
  if (made >= wanted) return;
  sigset_t all, before;  // signals are for the threads of Python
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, &before);
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  while (made < wanted) {
    pthread_t thread;
    slots[made].word = IDLE;
    if (pthread_create(&thread, &detached, work, &slots[made])) break;  // no room for a thread: do with those there are
    ++made;
  }
  pthread_attr_destroy(&detached);
  sigprocmask(SIG_SETMASK, &before, nullptr);
}

pthread_key_t scratch_key;
uint32_t scratch_state;  // 0: no key yet, 1: being made, 2: made
__thread char* scratch_memory;
__thread size_t scratch_room;

void free_scratch(void* memory) { free(memory); }

}  // namespace

void set_team(void* entry) {
  watch_forks();
  start_team = reinterpret_cast<StartTeam>(entry);
}

void parallel(int64_t parts, int threads, void (*body)(void*, int64_t), void* context) {
  int helpers = threads - 1 < parts - 1 ? threads - 1 : int(parts - 1);
  if (helpers > MOST) helpers = MOST;
  if (helpers <= 0 || !swap(&busy, 0, 1)) {
    for (int64_t part = 0; part < parts; ++part) body(context, part);
    return;
  }
  job.body = body;
  job.context = context;
  job.parts = parts;
  job.shares = helpers + 1;
  for (int i = 0; i <= helpers; ++i) __atomic_store_n(&taken[i].count, 0, __ATOMIC_RELEASE);
  if (gets_team()) {
    // All of them, as torch does: OpenMP ends threads that a smaller team leaves over and makes them again for the next.
    start_team(team_body, nullptr, unsigned(threads), 0);
    team_used = now();
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
    return;
  }
  make_workers(helpers);
  if (helpers > made) helpers = made;
  for (int i = 0; i < helpers; ++i)
    if (__atomic_exchange_n(&slots[i].word, POSTED, __ATOMIC_ACQ_REL) == SLEEPING) wake(&slots[i].word);
  take_parts(job, 0);
  for (int i = 0; i < helpers; ++i) {
    uint32_t* word = &slots[i].word;
    if (swap(word, POSTED, IDLE)) continue;  // it came too late: nothing was left to do
    if (spin_while(word, RUNNING)) continue;
    __atomic_store_n(&waiting, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == RUNNING) sleep_on(word, RUNNING);
    __atomic_store_n(&waiting, 0, __ATOMIC_SEQ_CST);
  }
  __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

void* scratch(size_t bytes) {
  if (bytes <= scratch_room) return scratch_memory;
  uint32_t expected = 0;
  if (__atomic_compare_exchange_n(&scratch_state, &expected, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    pthread_key_create(&scratch_key, free_scratch);
    __atomic_store_n(&scratch_state, 2, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(&scratch_state, __ATOMIC_ACQUIRE) != 2) pause_a_little();
  free(scratch_memory);
  scratch_memory = nullptr;
  scratch_room = 0;
  void* fresh = nullptr;
  size_t room = (bytes + 4095) / 4096 * 4096;
  if (posix_memalign(&fresh, 64, room) != 0) fresh = nullptr;
  pthread_setspecific(scratch_key, fresh);
  scratch_memory = static_cast<char*>(fresh);
  scratch_room = fresh ? room : 0;
  return fresh;
}

}  // namespace lz
