/* A parallel loop over work items, before every kernel for CPUs.
 *
 * With OpenMP, threads are started for each loop. A thread does its own share, which lies in its caches since the layer before, and then
 * takes from the ends of others' shares: cores may differ in speed, and other programs may use them. With CONVOY_TEAM (in packages) a team
 * of threads calls the kernel, and each does its share of the loop (team.c). Either way a work item computes the same bits, on
 * whichever thread. MEET() between two loops: the second begins when all items of the first are done.
 *
 * `PARALLEL_FOR(item, items, threads) statement`. `BEFORE_LOOP(thread, threads) statement` prepares what each of its threads has.
 * `EACH_ITEM(item, items, threads, call)` is for a call of a function that is not inlined: one thread makes it without OpenMP, whose
 * region for one takes as long as a small layer (0.4 to 0.9 us on an EPYC 7003).
 */
#include <stdint.h>

#define NOT_INLINED static __attribute__((noinline))

#ifdef CONVOY_TEAM
typedef struct {
    int64_t number, size;
} Team;

extern _Thread_local Team convoy_team; /* who the calling thread is */
extern void convoy_team_meet(void);

/* The first item of this thread's share; the next thread's first is this one's end. */
static inline int64_t convoy_share(int64_t items, int64_t threads, int64_t after) {
    int64_t workers = threads < convoy_team.size ? threads : convoy_team.size;
    if (workers < 1) workers = 1;
    return convoy_team.number < workers ? items * (convoy_team.number + after) / workers : items;
}

#define PARALLEL_FOR(item, items, threads)                                                                           \
    for (int64_t item = convoy_share(items, threads, 0), item##_end = convoy_share(items, threads, 1); item < item##_end; item++)
#define EACH_ITEM(item, items, threads, call) PARALLEL_FOR(item, items, threads) call
#define THREAD_NUMBER() convoy_team.number
#define MEET() convoy_team_meet()
#define BEFORE_LOOP(thread, threads) \
    for (int64_t thread = convoy_team.number, thread##_end = thread + (thread < (threads)); thread < thread##_end; thread++)
#define ALONE(call)                    \
    do {                               \
        Team team_before = convoy_team; \
        convoy_team = (Team){0, 1};    \
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

#define CONVOY_MOST_SHARES 64 /* more threads than this have a share together */
#define CONVOY_CHUNKS 16      /* most chunks of a share; a thread takes one chunk at a time */

/* Chunks of a loop that nobody has taken: those of each share from its first to before its end, which are the two halves of a word. */
typedef struct {
    int64_t items, chunk, count;
    struct {
        _Alignas(64) uint64_t left;
    } shares[CONVOY_MOST_SHARES];
} ConvoyShares;

static inline void convoy_share_out(ConvoyShares *all, int64_t items, int64_t threads) {
    all->count = threads < 1 ? 1 : threads < CONVOY_MOST_SHARES ? threads : CONVOY_MOST_SHARES;
    int64_t most = all->count * CONVOY_CHUNKS;
    all->items = items;
    all->chunk = (items + most - 1) / most;
    if (all->chunk < 1) all->chunk = 1;
    int64_t chunks = (items + all->chunk - 1) / all->chunk;
    for (int64_t i = 0; i < all->count; i++) {
        uint64_t first = (uint64_t)(chunks * i / all->count), end = (uint64_t)(chunks * (i + 1) / all->count);
        all->shares[i].left = first << 32 | end;
    }
}

/* Takes a chunk for a thread, the first one of its own share or the last one of another's; whether there was one. */
static inline int convoy_take(ConvoyShares *all, int64_t thread, int64_t *item, int64_t *end) {
    for (int64_t i = 0; i < all->count; i++) {
        uint64_t *share = &all->shares[(thread + i) % all->count].left, left = __atomic_load_n(share, __ATOMIC_RELAXED);
        while (left >> 32 < (left & UINT32_MAX)) {
            int64_t chunk = i ? (int64_t)(left & UINT32_MAX) - 1 : (int64_t)(left >> 32);
            uint64_t rest = i ? left - 1 : left + ((uint64_t)1 << 32);
            if (!__atomic_compare_exchange_n(share, &left, rest, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
            *item = chunk * all->chunk;
            *end = *item + all->chunk < all->items ? *item + all->chunk : all->items;
            return 1;
        }
    }
    return 0;
}

#define PARALLEL_FOR(item, items, threads)                                                                                     \
    for (ConvoyShares item##_all, *item##_once = (convoy_share_out(&item##_all, (items), (threads)), &item##_all); item##_once; \
         item##_once = 0)                                                                                                      \
        CONVOY_PRAGMA(omp parallel num_threads((int)(threads)) if ((threads) > 1))                                             \
        for (int64_t item = 0, item##_end = 0; convoy_take(&item##_all, THREAD_NUMBER(), &item, &item##_end);)                 \
            for (; item < item##_end; item++)

#define EACH_ITEM(item, items, threads, call)                              \
    if ((threads) > 1)                                                     \
        PARALLEL_FOR(item, items, threads) call;                           \
    else                                                                   \
        for (int64_t item = 0, item##_end = (items); item < item##_end; item++) call
#endif
