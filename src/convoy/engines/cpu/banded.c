/* Convolutions that follow each other, each in its own kernel, a band of rows of the last one's result at a time.
 *
 * What lies between them is as many rows as the next one reads, in a slot of the workspace that a thread's second cache holds. Rows
 * that the next band reads too move to the slot's beginning. A band of rows of a convolution is a convolution of fewer rows, with
 * fewer zeros above and below: so kernels are given other sizes, and compute what they would have.
 */
#include <string.h>

#define MOST_STAGES 4
#define MOST_WORDS 32
#define MOST_POINTERS 16

/* What every kernel's settings begin with. */
enum { N, C, H, W, K, R, S, PAD_H, PAD_W, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, P, Q };

typedef void Call(const void *settings, void *const *tensors);

typedef struct {
    Call *call;
    int64_t settings[MOST_WORDS];
    int64_t pointers;       /* of its tensors */
    int64_t x, residual, y; /* which of them; residual: -1 for none */
    int64_t offset;         /* of its result in a slot, floats; the last one's lies outside */
} Stage;

typedef struct {
    int64_t images, splits, rows, threads, slot_floats, stages;
    Stage stage[MOST_STAGES];
} Bands;

typedef struct {
    int64_t first, end;
} Rows;

typedef struct {
    const Bands *z;
    const float *x, *residual; /* of the image */
    float *y, *slot;
    void *const *tensors; /* the kernels' own, one after the other */
    Rows held[MOST_STAGES];
} Work;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* The rows of a convolution's input that these rows of its result are made of. */
static Rows read_by(const int64_t *z, Rows made) {
    int64_t first = made.first * z[STRIDE_H] - z[PAD_H];
    int64_t end = (made.end - 1) * z[STRIDE_H] - z[PAD_H] + (z[R] - 1) * z[DILATION_H] + 1;
    Rows found = {least(z[H], most(0, first)), 0};
    found.end = most(found.first, least(z[H], end));
    return found;
}

/* Row `row` of the result of a stage that is not the last. */
static float *inner(const Work *u, int64_t stage, int64_t row) {
    const Stage *s = u->z->stage + stage;
    return u->slot + s->offset + (row - u->held[stage].first) * s->settings[Q] * s->settings[K];
}

static void launch(const Work *u, int64_t stage, Rows made, void *const *tensors) {
    const Stage *s = u->z->stage + stage;
    const int64_t *z = s->settings;
    int64_t sizes[MOST_WORDS];
    void *pointers[MOST_POINTERS];
    Rows read = read_by(z, made);
    memcpy(sizes, z, sizeof sizes);
    sizes[H] = read.end - read.first;
    sizes[PAD_H] = read.first - (made.first * z[STRIDE_H] - z[PAD_H]);
    sizes[P] = made.end - made.first;
    memcpy(pointers, tensors, s->pointers * sizeof *pointers);
    int64_t at = made.first * z[Q] * z[K];
    pointers[s->x] = stage ? inner(u, stage - 1, read.first) : (float *)u->x + read.first * z[W] * z[C];
    pointers[s->y] = stage + 1 < u->z->stages ? inner(u, stage, made.first) : u->y + at;
    if (s->residual >= 0) pointers[s->residual] = (float *)u->residual + at;
    s->call(sizes, pointers);
}

/* Let go of the rows of a stage's result that come before `wanted`; returns the first that is not there yet. */
static int64_t slide(Work *u, int64_t stage, Rows wanted) {
    const int64_t *z = u->z->stage[stage].settings;
    Rows *held = u->held + stage;
    int64_t kept = most(0, held->end - wanted.first);
    if (kept && wanted.first > held->first)
        memmove(inner(u, stage, held->first), inner(u, stage, wanted.first), kept * z[Q] * z[K] * sizeof(float));
    held->first = wanted.first;
    held->end = wanted.end;
    return wanted.first + kept;
}

/* Rows `made` of the last stage's result, in one image, in bands as long as each other. */
static void run(Work *u, Rows made) {
    const Bands *z = u->z;
    int64_t rows = made.end - made.first, bands = (rows + z->rows - 1) / z->rows;
    for (int64_t band = 0; band < bands; band++) {
        Rows wanted[MOST_STAGES];
        wanted[z->stages - 1] = (Rows){made.first + rows * band / bands, made.first + rows * (band + 1) / bands};
        for (int64_t i = z->stages - 1; i > 0; i--) wanted[i - 1] = read_by(z->stage[i].settings, wanted[i]);
        void *const *tensors = u->tensors;
        for (int64_t i = 0; i < z->stages; tensors += z->stage[i++].pointers) {
            Rows now = wanted[i];
            if (i + 1 < z->stages) now.first = slide(u, i, wanted[i]);
            if (now.first < now.end) launch(u, i, now, tensors);
        }
    }
}

/* x, residual or NULL, y, `threads` slots of `slot_floats`, and the kernels' own tensors. */
void convoy_banded(const Bands *z, void *const *tensors) {
    const int64_t *first = z->stage[0].settings, *last = z->stage[z->stages - 1].settings;
    int64_t units = z->images * z->splits, made = last[P] * last[Q] * last[K];
    PARALLEL_FOR(unit, units, least(z->threads, units)) {
        int64_t image = unit / z->splits, split = unit % z->splits;
        Work u = {.z = z, .tensors = tensors + 4};
        u.x = (const float *)tensors[0] + image * first[H] * first[W] * first[C];
        u.residual = tensors[1] ? (const float *)tensors[1] + image * made : 0;
        u.y = (float *)tensors[2] + image * made;
        u.slot = (float *)tensors[3] + THREAD_NUMBER() * z->slot_floats;
        ALONE(run(&u, ((Rows){last[P] * split / z->splits, last[P] * (split + 1) / z->splits})));
    }
}
