/* Convolutions that follow each other, each in its own kernel, a band of rows of the last one's result at a time; layer.h stands
 * before this.
 *
 * What lies between them is as many rows as the next one reads, in a slot of the workspace that a thread's second cache holds. Rows
 * that the next band reads too move to the slot's beginning.
 */
#define MOST_STAGES 4

typedef struct {
    Layer layer;
    int64_t offset; /* of its result in a slot, floats; the last one's lies outside */
} Stage;

typedef struct {
    int64_t images, splits, rows, threads, slot_floats, stages;
    Stage stage[MOST_STAGES];
} Bands;

typedef struct {
    const Bands *z;
    const float *x, *residual; /* of the image */
    float *y, *slot;
    void *const *tensors; /* the kernels' own, one after the other */
    Rows held[MOST_STAGES];
} Work;

/* Row `row` of the result of a stage that is not the last. */
static float *inner(const Work *u, int64_t stage, int64_t row) {
    const Stage *s = u->z->stage + stage;
    return u->slot + s->offset + (row - u->held[stage].first) * s->layer.settings[Q] * s->layer.settings[K];
}

static void launch(const Work *u, int64_t stage, Rows made, void *const *tensors) {
    const Layer *s = &u->z->stage[stage].layer;
    const int64_t *z = s->settings;
    int64_t read = read_by(z, made).first, at = made.first * z[Q] * z[K];
    const float *x = stage ? inner(u, stage - 1, read) : u->x + read * z[W] * z[C];
    float *y = stage + 1 < u->z->stages ? inner(u, stage, made.first) : u->y + at;
    call_layer(s, made, x, u->residual ? u->residual + at : 0, y, tensors);
}

/* Let go of the rows of a stage's result that come before `wanted`; returns the first that is not there yet. */
static int64_t slide(Work *u, int64_t stage, Rows wanted) {
    const int64_t *z = u->z->stage[stage].layer.settings;
    Rows *held = u->held + stage;
    int64_t kept = greater(0, held->end - wanted.first);
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
        for (int64_t i = z->stages - 1; i > 0; i--) wanted[i - 1] = read_by(z->stage[i].layer.settings, wanted[i]);
        void *const *tensors = u->tensors;
        for (int64_t i = 0; i < z->stages; tensors += z->stage[i++].layer.pointers) {
            Rows now = wanted[i];
            if (i + 1 < z->stages) now.first = slide(u, i, wanted[i]);
            if (now.first < now.end) launch(u, i, now, tensors);
        }
    }
}

/* x, residual or NULL, y, `threads` slots of `slot_floats`, and the kernels' own tensors. */
void convoy_banded(const Bands *z, void *const *tensors) {
    const int64_t *first = z->stage[0].layer.settings, *last = z->stage[z->stages - 1].layer.settings;
    int64_t units = z->images * z->splits, made = last[P] * last[Q] * last[K];
    PARALLEL_FOR(unit, units, lesser(z->threads, units)) {
        int64_t image = unit / z->splits, split = unit % z->splits;
        Work u = {.z = z, .tensors = tensors + 4};
        u.x = (const float *)tensors[0] + image * first[H] * first[W] * first[C];
        u.residual = tensors[1] ? (const float *)tensors[1] + image * made : 0;
        u.y = (float *)tensors[2] + image * made;
        u.slot = (float *)tensors[3] + THREAD_NUMBER() * z->slot_floats;
        ALONE(run(&u, ((Rows){last[P] * split / z->splits, last[P] * (split + 1) / z->splits})));
    }
}
