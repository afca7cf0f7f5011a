/* LANES, the floats of a vector register, and BF16, if values are stored so, are given by the compiler's flags; activated.h stands
 * before this.
 *
 * Layer norm, computed in fp32: y = (x - mean) / sqrt(variance + eps) * scale + shift over the channels of each pixel, by the mean first and
 * the squares of what differs from it then, so that a large mean takes no digits of the variance.
 *
 * In NHWC a pixel's channels are a row of values. In NCHW they lie a plane apart: a unit is some pixels side by side, in registers
 * of their own.
 */
#define ROWS 16              /* of a unit */
#define SUMS 4               /* registers of sums side by side, which need not wait for each other */
#define COLUMNS 4            /* registers of pixels of a unit in NCHW */
#define WORTH_A_THREAD 16384 /* values that a thread must get for its start to be worth it */

typedef struct {
    const float *scale, *shift; /* NULL: one, zero */
    int64_t channels;
    float eps;
} Norm;

INLINE float over_lanes(vec value) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}

/* The sum of a row's values, or of the squares of their differences from `mean`. */
INLINE float row_sum(const stored *x, int64_t channels, const int squares, float mean) {
    vec sums[SUMS] = {{0}}, middle = all_lanes(mean);
    int64_t c = 0;
    for (; c + SUMS * LANES <= channels; c += SUMS * LANES)
        for (int i = 0; i < SUMS; i++) {
            vec value = stored_lanes(x + c + i * LANES);
            if (squares) value = (value - middle) * (value - middle);
            sums[i] += value;
        }
    for (; c + LANES <= channels; c += LANES) {
        vec value = stored_lanes(x + c);
        if (squares) value = (value - middle) * (value - middle);
        sums[0] += value;
    }
    float sum = over_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; c < channels; c++) {
        float value = from_stored(x[c]);
        sum += squares ? (value - mean) * (value - mean) : value;
    }
    return sum;
}

INLINE void norm_row(const Norm *u, const stored *x, stored *y) {
    int64_t channels = u->channels, c = 0;
    float mean = row_sum(x, channels, 0, 0.0f) / channels;
    float factor = 1.0f / __builtin_sqrtf(row_sum(x, channels, 1, mean) / channels + u->eps);
    for (; c + LANES <= channels; c += LANES) {
        vec value = (stored_lanes(x + c) - mean) * factor;
        if (u->scale) value *= *(const vec *)(u->scale + c);
        if (u->shift) value += *(const vec *)(u->shift + c);
        put_stored_lanes(y + c, value);
    }
    for (; c < channels; c++) {
        float value = (from_stored(x[c]) - mean) * factor;
        if (u->scale) value *= u->scale[c];
        if (u->shift) value += u->shift[c];
        y[c] = to_stored(value);
    }
}

/* `width` pixels of a plane: LANES of them, or fewer. */
INLINE vec columns_of(const stored *from, int64_t width) {
    return width == LANES ? stored_lanes(from) : first_stored_lanes(from, width);
}

/* Registers of pixels side by side, their channels `step` values apart; the last register has `width` pixels. */
INLINE void norm_columns(const int vectors, const Norm *u, const stored *x, stored *y, int64_t step, int64_t width) {
    vec means[COLUMNS] = {{0}}, factors[COLUMNS] = {{0}};
    for (int64_t c = 0; c < u->channels; c++)
        for (int v = 0; v < vectors; v++)
            means[v] += columns_of(x + c * step + v * LANES, v == vectors - 1 ? width : LANES);
    for (int v = 0; v < vectors; v++) means[v] /= (float)u->channels;
    for (int64_t c = 0; c < u->channels; c++)
        for (int v = 0; v < vectors; v++) {
            vec value = columns_of(x + c * step + v * LANES, v == vectors - 1 ? width : LANES) - means[v];
            factors[v] += value * value;
        }
    for (int v = 0; v < vectors; v++) {
        factors[v] = factors[v] / (float)u->channels + u->eps;
        for (int lane = 0; lane < LANES; lane++) factors[v][lane] = 1.0f / __builtin_sqrtf(factors[v][lane]);
    }
    for (int64_t c = 0; c < u->channels; c++)
        for (int v = 0; v < vectors; v++) {
            int64_t there = v == vectors - 1 ? width : LANES;
            vec value = (columns_of(x + c * step + v * LANES, there) - means[v]) * factors[v];
            if (u->scale) value *= u->scale[c];
            if (u->shift) value += u->shift[c];
            if (there == LANES)
                put_stored_lanes(y + c * step + v * LANES, value);
            else
                put_first_stored_lanes(y + c * step + v * LANES, value, there);
        }
}

/* The whole problem: x, scale or NULL, shift or NULL, and y. Settings: images, pixels of one, channels, whether they lie a plane
 * apart, threads, and the bits of eps. */
void NAMED(convoy_layer_norm)(const int64_t *settings, void *const *tensors) {
    int64_t images = settings[0], pixels = settings[1], channels = settings[2], planes = settings[3], threads = settings[4];
    union {
        int32_t bits;
        float value;
    } eps = {.bits = (int32_t)settings[5]};
    const stored *x = tensors[0];
    stored *y = tensors[3];
    Norm u = {tensors[1], tensors[2], channels, eps.value};
    threads = most(1, least(threads, images * pixels * channels / WORTH_A_THREAD));
    if (!planes) {
        int64_t rows = images * pixels;
        PARALLEL_FOR(unit, up(rows, ROWS), threads)
            for (int64_t row = unit * ROWS; row < least(rows, (unit + 1) * ROWS); row++)
                norm_row(&u, x + row * channels, y + row * channels);
        return;
    }
    int64_t blocks = up(pixels, COLUMNS * LANES);
    PARALLEL_FOR(unit, images * blocks, threads) {
        int64_t first = unit % blocks * COLUMNS * LANES, at = unit / blocks * channels * pixels + first;
        int64_t count = least(COLUMNS * LANES, pixels - first), vectors = up(count, LANES), width = count - (vectors - 1) * LANES;
        switch (vectors) {
        case 1: norm_columns(1, &u, x + at, y + at, pixels, width); break;
        case 2: norm_columns(2, &u, x + at, y + at, pixels, width); break;
        case 3: norm_columns(3, &u, x + at, y + at, pixels, width); break;
        case 4: norm_columns(4, &u, x + at, y + at, pixels, width); break;
        }
    }
}
