/* A parallel loop over work items, before every kernel for CPUs.
 *
 * With OpenMP, threads are started for each loop. With CONVOY_TEAM (in packages) a team of threads calls the kernel, and each does
 * its share of the loop (team.c). Either way a work item computes the same bits, on whichever thread.
 */
#include <stdint.h>

#ifdef CONVOY_TEAM
typedef struct {
    int64_t number, size;
} Team;

extern _Thread_local Team convoy_team; /* who the calling thread is */

/* The first item of this thread's share; the next thread's first is this one's end. */
static inline int64_t convoy_share(int64_t items, int64_t threads, int64_t after) {
    int64_t workers = threads < convoy_team.size ? threads : convoy_team.size;
    if (workers < 1) workers = 1;
    return convoy_team.number < workers ? items * (convoy_team.number + after) / workers : items;
}

#define PARALLEL_FOR(schedule, item, items, threads)                                                                 \
    for (int64_t item = convoy_share(items, threads, 0), item##_end = convoy_share(items, threads, 1); item < item##_end; item++)
#define THREAD_NUMBER() convoy_team.number
#define ALONE(call)                    \
    do {                               \
        Team team_before = convoy_team; \
        convoy_team = (Team){0, 1};    \
        call;                          \
        convoy_team = team_before;     \
    } while (0) /* a call of another kernel within a work item: this thread does all of it */
#else
#define ALONE(call) call
#define CONVOY_TEXT(...) #__VA_ARGS__
#define CONVOY_PRAGMA(...) _Pragma(CONVOY_TEXT(__VA_ARGS__))
#define PARALLEL_FOR(way, item, items, threads)                                                                      \
    CONVOY_PRAGMA(omp parallel for schedule(way) num_threads((int)(threads)) if ((threads) > 1))                     \
    for (int64_t item = 0; item < (items); item++)
#ifdef _OPENMP
#include <omp.h>
#define THREAD_NUMBER() omp_get_thread_num()
#else
#define THREAD_NUMBER() 0
#endif
#endif
