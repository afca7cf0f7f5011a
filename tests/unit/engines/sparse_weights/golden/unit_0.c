#define HIDDEN __attribute__((visibility("hidden")))
typedef float vec __attribute__((vector_size(16)));
typedef float vec_at __attribute__((vector_size(16), aligned(4), may_alias));
#define LOAD(at) (*(const vec_at *)(at))
#define STORE(at, v) (*(vec_at *)(at) = (v))
HIDDEN void piece_0_0(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_0_0(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = {0};
    { const vec x0 = LOAD(x + 0);
    a0_0 += x0 * w[0];
    }
    STORE(y + 0, a0_0);
}
HIDDEN void piece_0_1(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_0_1(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = LOAD(y + 0);
    { const vec x0 = LOAD(x + 400);
    a0_0 += x0 * w[0];
    }
    STORE(y + 0, a0_0);
}
HIDDEN void piece_1_0(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_1_0(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = {0};
    vec a1_0 = {0};
    { const vec x0 = LOAD(x + 0);
    a0_0 += x0 * w[0];
    }
    { const vec x0 = LOAD(x + 6);
    a1_0 += x0 * w[1];
    }
    STORE(y + 0, a0_0);
    STORE(y + 48, a1_0);
}
HIDDEN void piece_1_1(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_1_1(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = LOAD(y + 0);
    vec a1_0 = LOAD(y + 48);
    { const vec x0 = LOAD(x + 325);
    a0_0 += x0 * w[0];
    }
    { const vec x0 = LOAD(x + 400);
    a1_0 += x0 * w[1];
    }
    STORE(y + 0, a0_0);
    STORE(y + 48, a1_0);
}
HIDDEN void piece_2_0(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_2_0(const float *restrict x, const float *restrict w, float *restrict y)
{
    (void)x, (void)w;
    vec a0_0 = {0};
    STORE(y + 0, a0_0);
}
#include <stddef.h>
#include <string.h>
#define HIDDEN __attribute__((visibility("hidden")))
#define N ((ptrdiff_t)2)
#define C ((ptrdiff_t)3)
#define H ((ptrdiff_t)8)
#define W ((ptrdiff_t)7)
#define K ((ptrdiff_t)4)
#define P ((ptrdiff_t)4)
#define Q ((ptrdiff_t)4)
#define PAD_H ((ptrdiff_t)1)
#define STRIDE_H ((ptrdiff_t)2)
#define STRIDE_W ((ptrdiff_t)2)
#define PAD_W ((ptrdiff_t)1)
#define REACH_H ((ptrdiff_t)1)
#define PITCH ((ptrdiff_t)5)
#define IMAGE_ROWS ((ptrdiff_t)5)
#define IMAGES ((ptrdiff_t)2)
#define ROWS ((ptrdiff_t)4)
#define IMAGE_BLOCKS ((ptrdiff_t)1)
#define ROW_BLOCKS ((ptrdiff_t)1)
#define CHANNELS ((ptrdiff_t)2)
#define PHASES ((ptrdiff_t)3)
#define PLANE ((ptrdiff_t)80)
#define TILE ((ptrdiff_t)4)
#define SUMS ((ptrdiff_t)48)
#define RUN ((ptrdiff_t)11)
#define GROUPS ((ptrdiff_t)3)
#define GROUP_COST ((ptrdiff_t)22)
#define TOTAL_COST ((ptrdiff_t)242)
#define BLOCK_FLOATS ((ptrdiff_t)480)
#define THREAD_FLOATS ((ptrdiff_t)576)
#define BIAS 1
#define RESIDUAL 1
#define RELU 1
#define RELU6 1
static const ptrdiff_t channels[] = {0, 2};
static const struct { ptrdiff_t row, column, first, after; } phases[] = {{0, 0, 1, 4}, {0, 1, 0, 4}, {1, 1, 0, 4}};

struct job {
    const float *x, *w, *bias, *residual;
    float *y, *scratch;
};

static inline ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static inline ptrdiff_t most(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

/* The padded input of a block: its images from `image` on, its output rows from `row` on. */
static void fill(const float *restrict x, float *restrict block, ptrdiff_t image, ptrdiff_t images, ptrdiff_t row,
                 ptrdiff_t rows)
{
    for (ptrdiff_t slot = 0; slot < CHANNELS; slot++)
        for (ptrdiff_t phase = 0; phase < PHASES; phase++) {
            float *restrict to = block + (slot * PHASES + phase) * PLANE;
            float *const end = to + PLANE;
            const ptrdiff_t first = phases[phase].first, after = phases[phase].after;
            for (ptrdiff_t i = 0; i < images; i++) {
                const float *in = x + ((image + i) * C + channels[slot]) * H * W;
                const ptrdiff_t tall = i + 1 < images ? IMAGE_ROWS : rows + REACH_H;
                for (ptrdiff_t j = 0; j < tall; j++, to += PITCH) {
                    const ptrdiff_t h = (row + j) * STRIDE_H + phases[phase].row - PAD_H;
                    if (h < 0 || h >= H) {
                        memset(to, 0, sizeof(float) * (size_t)PITCH);
                        continue;
                    }
                    const float *restrict from = in + h * W + (first * STRIDE_W + phases[phase].column - PAD_W);
                    for (ptrdiff_t t = 0; t < first; t++)
                        to[t] = 0;
                    for (ptrdiff_t t = first; t < after; t++)
                        to[t] = from[(t - first) * STRIDE_W];
                    for (ptrdiff_t t = after; t < PITCH; t++)
                        to[t] = 0;
                }
            }
            memset(to, 0, sizeof(float) * (size_t)(end - to));
        }
}

HIDDEN void piece_0_0(const float *, const float *, float *);
HIDDEN void piece_0_1(const float *, const float *, float *);
static void group_0(const float *x, const float *w, float *y, ptrdiff_t tiles)
{
    for (ptrdiff_t t = 0; t < tiles; t++)
        piece_0_0(x + t * TILE, w + 0, y + t * TILE);
    for (ptrdiff_t t = 0; t < tiles; t++)
        piece_0_1(x + t * TILE, w + 1, y + t * TILE);
}
HIDDEN void piece_1_0(const float *, const float *, float *);
HIDDEN void piece_1_1(const float *, const float *, float *);
static void group_1(const float *x, const float *w, float *y, ptrdiff_t tiles)
{
    for (ptrdiff_t t = 0; t < tiles; t++)
        piece_1_0(x + t * TILE, w + 2, y + t * TILE);
    for (ptrdiff_t t = 0; t < tiles; t++)
        piece_1_1(x + t * TILE, w + 4, y + t * TILE);
}
HIDDEN void piece_2_0(const float *, const float *, float *);
static void group_2(const float *x, const float *w, float *y, ptrdiff_t tiles)
{
    for (ptrdiff_t t = 0; t < tiles; t++)
        piece_2_0(x + t * TILE, w + 0, y + t * TILE);
}
static const int filters[] = {0, 1, 3, 2};
static const struct group {
    void (*run)(const float *, const float *, float *, ptrdiff_t);
    ptrdiff_t cost, first, count;
} groups[] = {
    {group_0, 6, 0, 1},
    {group_1, 12, 1, 2},
    {group_2, 4, 3, 1}
};

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
