static inline float finished(float v)
{
#if RELU
    v = v < 0 ? 0 : v;
#endif
#if RELU6
    v = v > 6 ? 6 : v;
#endif
    return v;
}

/* Sums at positions [from, to) of a block, the first of them at `sums`, to y, with all that follows. */
static void finish(const struct job *job, const struct group *group, const float *restrict sums, ptrdiff_t image,
                   ptrdiff_t row, ptrdiff_t rows, ptrdiff_t from, ptrdiff_t to)
{
    for (ptrdiff_t f = 0; f < group->count; f++, sums += SUMS) {
        const ptrdiff_t k = filters[group->first + f];
#if BIAS
        const float bias = job->bias[k];
#else
        const float bias = 0;
#endif
        for (ptrdiff_t line = from / PITCH; line * PITCH < to; line++) {
            const ptrdiff_t i = IMAGES > 1 ? line / IMAGE_ROWS : 0, p = IMAGES > 1 ? line % IMAGE_ROWS : line;
            const ptrdiff_t a = most(from - line * PITCH, 0), b = least(to - line * PITCH, Q);
            if (p >= rows)
                continue;
            const float *restrict s = sums + (line * PITCH - from);
            const ptrdiff_t at = (((image + i) * K + k) * P + row + p) * Q;
            float *restrict y = job->y + at;
#if RESIDUAL
            const float *restrict residual = job->residual + at;
            for (ptrdiff_t q = a; q < b; q++)
                y[q] = finished(s[q] + bias + residual[q]);
#else
            for (ptrdiff_t q = a; q < b; q++)
                y[q] = finished(s[q] + bias);
#endif
        }
    }
}


/* First tile whose cost begins at `bound` or later, of tiles that begin at `at` and cost `cost` each. */
static inline ptrdiff_t tile_at(ptrdiff_t bound, ptrdiff_t at, ptrdiff_t cost, ptrdiff_t tiles)
{
    return bound <= at ? 0 : least((bound - at + cost - 1) / cost, tiles);
}

/* The share of one thread: everything whose cost begins in [low, high). */
static void share(const struct job *job, ptrdiff_t thread, ptrdiff_t threads)
{
    const ptrdiff_t low = TOTAL_COST / threads * thread + TOTAL_COST % threads * thread / threads;
    const ptrdiff_t high = TOTAL_COST / threads * (thread + 1) + TOTAL_COST % threads * (thread + 1) / threads;
    float *block = job->scratch + thread * THREAD_FLOATS, *sums = block + BLOCK_FLOATS;
    ptrdiff_t at = 0;
    for (ptrdiff_t index = 0; index < IMAGE_BLOCKS * ROW_BLOCKS && at < high; index++) {
        const ptrdiff_t image = index / ROW_BLOCKS * IMAGES, row = index % ROW_BLOCKS * ROWS;
        const ptrdiff_t images = least(IMAGES, N - image), rows = least(ROWS, P - row);
        const ptrdiff_t positions = ((images - 1) * IMAGE_ROWS + rows - 1) * PITCH + Q;
        const ptrdiff_t tiles = (positions + TILE - 1) / TILE;
        int filled = 0;
        for (ptrdiff_t g = 0; g < GROUPS; g++) {
            const ptrdiff_t cost = groups[g].cost;
            const ptrdiff_t from = tile_at(low, at, cost, tiles), to = tile_at(high, at, cost, tiles);
            at += tiles * cost;
            if (from >= to)
                continue;
            if (!filled)
                fill(job->x, block, image, images, row, rows);
            filled = 1;
            for (ptrdiff_t t = from; t < to; t += RUN) {
                const ptrdiff_t end = least(t + RUN, to);
                groups[g].run(block + t * TILE, job->w, sums, end - t);
                finish(job, &groups[g], sums, image, row, rows, t * TILE, least(end * TILE, positions));
            }
        }
    }
}

#ifdef _OPENMP
#include <omp.h>
#endif

void convoy_pruned(const float *x, const float *w, const float *bias, const float *residual, float *y, float *scratch,
                   int threads);
void convoy_pruned(const float *x, const float *w, const float *bias, const float *residual, float *y, float *scratch,
                   int threads)
{
    const struct job job = {x, w, bias, residual, y, scratch};
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        share(&job, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    share(&job, 0, 1);
}
