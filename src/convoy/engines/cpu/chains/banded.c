/* Convolutions that follow each other, each in its own kernel, a band of rows of the last one's result at a time; layer.h stands
 * before this.
 *
 * What lies between them is as many rows as the next one reads, in a slot of the workspace that a thread's second cache holds. Rows
 * that the next band reads too move to the slot's beginning. A thread goes through the bands of its share in order; for a band that it takes
 * from another thread's share it makes all rows anew.
 */
#define MOST_STAGES 4
#define STATE_FLOATS 32

typedef struct {
    Layer layer;
    int64_t offset; /* of its result in a slot, floats; the last one's lies outside */
} Stage;

typedef struct {
    int64_t images, bands, threads, slot_floats, stages;
    Stage stage[MOST_STAGES];
} Bands;

/* What stands in a slot, in STATE_FLOATS, before the rows. */
typedef struct {
    int64_t next; /* the band for which the rows are there */
    Rows held[MOST_STAGES];
} State;

typedef struct {
    const Bands *z;
    const float *x, *residual; /* of the image */
    float *y, *slot;
    void *const *tensors; /* the kernels' own, one after the other */
    State *state;
} Work;

/* Row `row` of the result of a stage that is not the last. */
static float *inner(const Work *u, int64_t stage, int64_t row) {
    const Stage *s = u->z->stage + stage;
    return u->slot + s->offset + (row - u->state->held[stage].first) * s->layer.settings[Q] * s->layer.settings[K];
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
    Rows *held = u->state->held + stage;
    int64_t kept = greater(0, held->end - wanted.first);
    if (kept && wanted.first > held->first)
        memmove(inner(u, stage, held->first), inner(u, stage, wanted.first), kept * z[Q] * z[K] * sizeof(float));
    held->first = wanted.first;
    held->end = wanted.end;
    return wanted.first + kept;
}

/* Rows `made` of the last stage's result, in one image. */
static void run(Work *u, Rows made) {
    const Bands *z = u->z;
    Rows wanted[MOST_STAGES];
    wanted[z->stages - 1] = made;
    for (int64_t i = z->stages - 1; i > 0; i--) wanted[i - 1] = read_by(z->stage[i].layer.settings, wanted[i]);
    void *const *tensors = u->tensors;
    for (int64_t i = 0; i < z->stages; tensors += z->stage[i++].layer.pointers) {
        Rows now = wanted[i];
        if (i + 1 < z->stages) now.first = slide(u, i, wanted[i]);
        if (now.first < now.end) launch(u, i, now, tensors);
    }
}

/* A band of an image: rows as many as others have. */
static void run_band(const Bands *z, void *const *tensors, int64_t unit, float *slot) {
    const int64_t *first = z->stage[0].layer.settings, *last = z->stage[z->stages - 1].layer.settings;
    int64_t image = unit / z->bands, band = unit % z->bands, made = last[P] * last[Q] * last[K];
    Work u = {.z = z, .tensors = tensors + 4, .slot = slot, .state = (State *)slot};
    u.x = (const float *)tensors[0] + image * first[H] * first[W] * first[C];
    u.residual = tensors[1] ? (const float *)tensors[1] + image * made : 0;
    u.y = (float *)tensors[2] + image * made;
    if (u.state->next != unit || band == 0) memset(u.state, 0, sizeof(State));
    run(&u, (Rows){last[P] * band / z->bands, last[P] * (band + 1) / z->bands});
    u.state->next = unit + 1;
}

/* x, residual or NULL, y, `threads` slots of `slot_floats`, and the kernels' own tensors. */
void convoy_banded(const Bands *z, void *const *tensors) {
    int64_t units = z->images * z->bands, threads = lesser(z->threads, units);
    float *slots = tensors[3];
    BEFORE_LOOP(thread, threads) ((State *)(slots + thread * z->slot_floats))->next = -1;
    PARALLEL_FOR(unit, units, threads) {
        float *slot = slots + THREAD_NUMBER() * z->slot_floats;
        ALONE(run_band(z, tensors, unit, slot));
    }
}
