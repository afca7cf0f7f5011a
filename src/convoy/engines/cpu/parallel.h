/* A parallel loop over work items, before every kernel for CPUs.
 *
 * A thread does its own share, which lies in its caches since the layer before, and then takes from the ends of others' shares: cores
 * may differ in speed, and other programs may use them. With OpenMP, threads are started for each loop. With CONVOY_TEAM (in packages)
 * a team of threads calls the kernel, and all of them begin the same loops in the same order (team.c). Either way a work item computes
 * the same bits, on whichever thread. MEET() between two loops: what follows begins when all items of the first are done, as a second
 * loop does without it.
 *
 * `PARALLEL_FOR(item, items, threads) statement`. `BEFORE_LOOP(thread, threads) statement` prepares what each of its threads has.
 * `EACH_ITEM(item, items, threads, call)` is for a call of a function that is not inlined: one thread makes it without OpenMP, whose
 * region for one takes as long as a small layer (0.4 to 0.9 us on an EPYC 7003).
 */
#include <stdint.h>

#define NOT_INLINED static __attribute__((noinline))
#define CONVOY_MOST_SHARES 64 /* more threads than this have a share together */
#define CONVOY_CHUNKS 16      /* most chunks of a share; a thread takes one chunk at a time */

/* The chunks of each share that nobody has taken: the last byte of its word is the end, the byte before it the first one. The rest is
 * the loop's number: a word of an earlier loop means that nobody has taken from this share yet. So no thread waits for its owner. */
typedef struct {
    struct {
        _Alignas(64) uint64_t left;
    } of[CONVOY_MOST_SHARES];
} ConvoyShares;

/* A loop: all its threads find the same numbers. Its first `longer` shares have `each` + 1 chunks, the others `each`. */
typedef struct {
    uint64_t number;
    int64_t items, chunk, count, each, longer;
    ConvoyShares *shares; /* NULL: one thread does all items */
} ConvoyLoop;

static inline void convoy_share_out(ConvoyLoop *all, int64_t items, int64_t threads, ConvoyShares *shares, uint64_t number) {
    *all = (ConvoyLoop){.number = number, .items = items, .shares = threads > 1 ? shares : 0};
    if (!all->shares) return;
    all->count = threads < CONVOY_MOST_SHARES ? threads : CONVOY_MOST_SHARES;
    int64_t most = all->count * CONVOY_CHUNKS, chunk = (items + most - 1) / most;
    all->chunk = chunk < 1 ? 1 : chunk;
    int64_t chunks = (items + all->chunk - 1) / all->chunk;
    all->each = chunks / all->count, all->longer = chunks % all->count;
}

/* Takes a chunk for a thread, the first one of its own share or the last one of another's; whether there was one. */
static inline int convoy_take(ConvoyLoop *all, int64_t thread, int64_t *item, int64_t *end) {
    if (!all->shares) {
        *item = 0, *end = all->items, all->items = 0;
        return *end > 0;
    }
    for (int64_t i = 0; i < all->count; i++) {
        int64_t share = (thread + i) % all->count;
        uint64_t *word = &all->shares->of[share].left, left = __atomic_load_n(word, __ATOMIC_RELAXED);
        for (;;) {
            uint64_t first = 0, after = (uint64_t)(all->each + (share < all->longer));
            if (left >> 16 == all->number) first = left >> 8 & 255, after = left & 255;
            if (first == after) break;
            int64_t chunk = (int64_t)(i ? --after : first++);
            uint64_t rest = all->number << 16 | first << 8 | after;
            if (!__atomic_compare_exchange_n(word, &left, rest, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
            chunk += share * all->each + (share < all->longer ? share : all->longer);
            *item = chunk * all->chunk;
            *end = *item + all->chunk < all->items ? *item + all->chunk : all->items;
            return 1;
        }
    }
    return 0;
}

#ifdef CONVOY_TEAM
typedef struct {
    int64_t number, size;
    uint64_t loops, met; /* begun so far, and before the threads met last */
    ConvoyShares *shares;
} Team;

extern _Thread_local Team convoy_team; /* who the calling thread is */
extern void convoy_team_meet(void);

/* Begins a loop when all items of the one before are done. A thread that is too many for it has no items, because it has no scratch. */
static inline ConvoyLoop *convoy_begin(ConvoyLoop *all, int64_t items, int64_t threads) {
    Team *team = &convoy_team;
    if (team->loops != team->met) convoy_team_meet();
    int64_t workers = threads < team->size ? threads : team->size, idle = team->number > 0 && team->number >= workers;
    convoy_share_out(all, idle ? 0 : items, idle ? 1 : workers, team->shares, ++team->loops);
    return all;
}

#define PARALLEL_FOR(item, items, threads)                                                                                      \
    for (ConvoyLoop item##_all, *item##_once = convoy_begin(&item##_all, (items), (threads)); item##_once; item##_once = 0)     \
        for (int64_t item = 0, item##_end = 0; convoy_take(&item##_all, convoy_team.number, &item, &item##_end);)               \
            for (; item < item##_end; item++)

#define EACH_ITEM(item, items, threads, call) PARALLEL_FOR(item, items, threads) call
#define THREAD_NUMBER() convoy_team.number
#define MEET() convoy_team_meet()
#define BEFORE_LOOP(thread, threads) \
    for (int64_t thread = convoy_team.number, thread##_end = thread + (thread < (threads)); thread < thread##_end; thread++)
#define ALONE(call)                    \
    do {                               \
        Team team_before = convoy_team; \
        convoy_team = (Team){.size = 1}; \
        call;                          \
        convoy_team = team_before;     \
    } while (0) /* a call of another kernel within a work item: this thread does all of it */
#else
#define ALONE(call) call
#define MEET() ((void)0) /* a loop's threads end with it */
#define BEFORE_LOOP(thread, threads) for (int64_t thread = 0, thread##_end = (threads); thread < thread##_end; thread++)
#define CONVOY_TEXT(...) #__VA_ARGS__
#define CONVOY_PRAGMA(...) _Pragma(CONVOY_TEXT(__VA_ARGS__))
#ifdef _OPENMP
#include <omp.h>
#define THREAD_NUMBER() omp_get_thread_num()
#else
#define THREAD_NUMBER() 0
#endif

/* A loop with its shares. */
typedef struct {
    ConvoyLoop loop;
    ConvoyShares shares;
} ConvoyRegion;

static inline ConvoyRegion *convoy_begin(ConvoyRegion *all, int64_t items, int64_t threads) {
    convoy_share_out(&all->loop, items, threads, &all->shares, 1);
    for (int64_t i = 0; i < all->loop.count; i++) all->shares.of[i].left = 0;
    return all;
}

#define PARALLEL_FOR(item, items, threads)                                                                                      \
    for (ConvoyRegion item##_all, *item##_once = convoy_begin(&item##_all, (items), (threads)); item##_once; item##_once = 0)   \
        CONVOY_PRAGMA(omp parallel num_threads((int)(threads)) if ((threads) > 1))                                              \
        for (int64_t item = 0, item##_end = 0; convoy_take(&item##_all.loop, THREAD_NUMBER(), &item, &item##_end);)             \
            for (; item < item##_end; item++)

#define EACH_ITEM(item, items, threads, call)                              \
    if ((threads) > 1)                                                     \
        PARALLEL_FOR(item, items, threads) call;                           \
    else                                                                   \
        for (int64_t item = 0, item##_end = (items); item < item##_end; item++) call
#endif
