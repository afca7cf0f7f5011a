/* Runs the launches of a package by a team of threads; parallel.h stands before this.
 *
 * Every thread makes every launch. Of each of the kernel's loops it does its share, and then what others have not begun of theirs.
 * Before the next launch all wait for each other. A pool serves one caller at a time. Between runs its threads sleep. In a process that
 * was forked from the pool's, the caller does all.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_TENSORS 64
#define SPINS 4000 /* looks at a variable before a thread sleeps: some tens of microseconds */
#define EXPORTED __attribute__((visibility("default")))

_Thread_local Team convoy_team = {.size = 1};
static _Thread_local struct Pool *own_pool; /* of the calling thread, while it makes launches */

typedef struct {
    void *fixed;
    int64_t slot; /* -1: fixed */
} Operand;

typedef struct {
    void (*call)(const void *settings, void *const *tensors);
    const void *settings;
    const Operand *operands;
    int64_t count;
} Launch;

typedef struct Pool Pool;

typedef struct {
    Pool *pool;
    pthread_t thread;
    int64_t number;
    uint64_t loops; /* begun so far: as many by each thread when a job is done */
} Worker;

struct Pool {
    int64_t size;
    pid_t process;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* job or phase */
    atomic_uint job, phase;
    atomic_long arrived;
    int ends;
    const Launch *launches;
    int64_t count;
    void *const *slots;
    ConvoyShares shares; /* of the loop that the threads are in */
    Worker workers[];
};

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Until a counter has another value than `seen`. */
static void wait_for(Pool *pool, atomic_uint *counter, unsigned seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(counter, memory_order_acquire) != seen) return;
        pause_briefly();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load_explicit(counter, memory_order_acquire) == seen) pthread_cond_wait(&pool->changed, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

static void advance(Pool *pool, atomic_uint *counter) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add_explicit(counter, 1, memory_order_release);
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
}

static void meet(Pool *pool) {
    unsigned phase = atomic_load_explicit(&pool->phase, memory_order_acquire);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 == pool->size) {
        atomic_store(&pool->arrived, 0);
        advance(pool, &pool->phase);
    } else
        wait_for(pool, &pool->phase, phase);
}

/* Behind a loop of a kernel. */
void convoy_team_meet(void) {
    if (convoy_team.size > 1) meet(own_pool);
    convoy_team.met = convoy_team.loops;
}

static void launch(const Launch *one, void *const *slots) {
    void *tensors[MOST_TENSORS];
    for (int64_t i = 0; i < one->count; i++) {
        const Operand *from = one->operands + i;
        tensors[i] = from->slot < 0 ? from->fixed : slots[from->slot];
    }
    one->call(one->settings, tensors);
}

static void do_share(Pool *pool, int64_t number) {
    const Launch *end = pool->launches + pool->count;
    void *const *slots = pool->slots;
    Team before = convoy_team;
    uint64_t loops = pool->workers[number].loops;
    convoy_team = (Team){number, pool->size, loops, loops, &pool->shares};
    own_pool = pool;
    for (const Launch *one = pool->launches; one < end; one++) {
        launch(one, slots);
        convoy_team_meet();
    }
    pool->workers[number].loops = convoy_team.loops;
    convoy_team = before;
}

static void *work(void *argument) {
    Worker *worker = argument;
    Pool *pool = worker->pool;
    for (unsigned job = 0;; job++) {
        wait_for(pool, &pool->job, job);
        if (pool->ends) return NULL;
        do_share(pool, worker->number);
    }
}

EXPORTED void convoy_pool_free(Pool *pool) {
    if (!pool) return;
    if (pool->process == getpid()) {
        pool->ends = 1;
        advance(pool, &pool->job);
        for (int64_t i = 1; i < pool->size; i++) pthread_join(pool->workers[i].thread, NULL);
        pthread_cond_destroy(&pool->changed);
        pthread_mutex_destroy(&pool->lock);
    }
    free(pool);
}

/* A pool of so many threads, the caller among them, or fewer if the system allows no more; NULL for one, or without memory. */
EXPORTED Pool *convoy_pool_new(int64_t threads) {
    if (threads < 2) return NULL;
    size_t line = _Alignof(Pool), bytes = (sizeof(Pool) + (size_t)threads * sizeof(Worker) + line - 1) / line * line;
    Pool *pool = aligned_alloc(line, bytes);
    sigset_t all, before;
    if (!pool) return NULL;
    memset(pool, 0, bytes);
    pool->process = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int64_t made = 1;
    for (; made < threads; made++) {
        pool->workers[made] = (Worker){.pool = pool, .number = made};
        if (pthread_create(&pool->workers[made].thread, NULL, work, pool->workers + made)) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool->size = made;
    return pool;
}

/* Make launches in order. `slots` holds the pointers that operands name. */
EXPORTED void convoy_pool_run(Pool *pool, const Launch *launches, int64_t count, void *const *slots) {
    if (!count) return; /* threads meet after launches only */
    if (!pool || pool->size < 2 || pool->process != getpid()) {
        Team before = convoy_team;
        convoy_team = (Team){.size = 1};
        for (int64_t i = 0; i < count; i++) launch(launches + i, slots);
        convoy_team = before;
        return;
    }
    pool->launches = launches;
    pool->count = count;
    pool->slots = slots;
    advance(pool, &pool->job);
    do_share(pool, 0);
}
