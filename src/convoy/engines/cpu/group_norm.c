/* LANES, the floats of a vector register, and BF16, if values are stored so, are given by the compiler's flags; activated.h stands
 * before this.
 *
 * Group norm in NHWC, computed in fp32, with an activation: a unit is some groups of one image, at least 64 channels of them. The first pass
 * over its pixels takes sums for each channel, around the first pixel, so that a large mean takes no digits of the variance;
 * channels become groups by their means and variances; the second pass normalises.
 */
#define VECTORS 4            /* registers of channels side by side */
#define BLOCK 128            /* pixels whose sums are taken apart, which keeps the digits of long sums */
#define WORTH_A_THREAD 16384 /* values that a thread must get for its start to be worth it */

typedef struct {
    const float *scale, *shift; /* of the unit's channels; NULL: one, zero */
    int64_t pixels, step, size; /* pixels, values from one to the next, channels of a group */
    float eps;
} Norm;

/* `width` channels: LANES of them, or fewer. */
INLINE vec channels_of(const float *from, int64_t width) { return width == LANES ? *(const vec *)from : first_lanes(from, width); }

INLINE vec values_of(const stored *from, int64_t width) {
    return width == LANES ? stored_lanes(from) : first_stored_lanes(from, width);
}

INLINE void put_values(stored *to, vec value, int64_t width) {
    if (width == LANES)
        put_stored_lanes(to, value);
    else
        put_first_stored_lanes(to, value, width);
}

INLINE void put_channels(float *to, vec value, int64_t width) {
    if (width == LANES)
        *(vec *)to = value;
    else
        put_first_lanes(to, value, width);
}

/* Mean and variance of each channel; the last register has `width` channels. */
INLINE void moments(const int vectors, const Norm *u, const stored *x, int64_t width, float *means, float *variances) {
    vec origin[VECTORS], first[VECTORS] = {{0}}, second[VECTORS] = {{0}};
    for (int v = 0; v < vectors; v++) origin[v] = values_of(x + v * LANES, v == vectors - 1 ? width : LANES);
    for (int64_t begin = 0; begin < u->pixels; begin += BLOCK) {
        vec sums[VECTORS] = {{0}}, squares[VECTORS] = {{0}};
        for (int64_t p = begin; p < least(u->pixels, begin + BLOCK); p++)
            for (int v = 0; v < vectors; v++) {
                vec value = values_of(x + p * u->step + v * LANES, v == vectors - 1 ? width : LANES) - origin[v];
                sums[v] += value;
                squares[v] += value * value;
            }
        for (int v = 0; v < vectors; v++) first[v] += sums[v], second[v] += squares[v];
    }
    for (int v = 0; v < vectors; v++) {
        vec mean = first[v] / (float)u->pixels;
        put_channels(means + v * LANES, origin[v] + mean, v == vectors - 1 ? width : LANES);
        put_channels(variances + v * LANES, at_least(second[v] / (float)u->pixels - mean * mean, 0.0f), v == vectors - 1 ? width : LANES);
    }
}

/* From means and variances of channels to the group's mean and the factor of each channel. */
INLINE void join(const Norm *u, float *means, float *factors, int64_t first) {
    float mean = 0.0f, variance = 0.0f;
    for (int64_t c = first; c < first + u->size; c++) mean += means[c];
    mean /= (float)u->size;
    for (int64_t c = first; c < first + u->size; c++) variance += factors[c] + (means[c] - mean) * (means[c] - mean);
    float factor = 1.0f / __builtin_sqrtf(variance / (float)u->size + u->eps);
    for (int64_t c = first; c < first + u->size; c++) {
        means[c] = mean;
        factors[c] = u->scale ? factor * u->scale[c] : factor;
    }
}

INLINE void normalise(const Norm *u, const stored *x, stored *y, int64_t count, const float *means, const float *factors,
                      const int activation) {
    for (int64_t p = 0; p < u->pixels; p++)
        for (int64_t c = 0; c < count; c += LANES) {
            int64_t at = p * u->step + c, width = least(LANES, count - c);
            vec value = (values_of(x + at, width) - channels_of(means + c, width)) * channels_of(factors + c, width);
            if (u->shift) value += channels_of(u->shift + c, width);
            put_values(y + at, activation == SILU ? smooth_one(value, SILU) : activated(value, activation), width);
        }
}

/* `count` channels of one image, whole groups. */
static void norm_unit(const Norm *u, const stored *x, stored *y, int64_t count, int64_t activation, float *means, float *factors) {
    for (int64_t c = 0; c < count; c += VECTORS * LANES) {
        int64_t left = least(VECTORS * LANES, count - c), vectors = up(left, LANES), width = left - (vectors - 1) * LANES;
        switch (vectors) {
        case 1: moments(1, u, x + c, width, means + c, factors + c); break;
        case 2: moments(2, u, x + c, width, means + c, factors + c); break;
        case 3: moments(3, u, x + c, width, means + c, factors + c); break;
        case 4: moments(4, u, x + c, width, means + c, factors + c); break;
        }
    }
    for (int64_t c = 0; c < count; c += u->size) join(u, means, factors, c);
    switch (activation) {
    case SILU: normalise(u, x, y, count, means, factors, SILU); break;
    case RELU: normalise(u, x, y, count, means, factors, RELU); break;
    default: normalise(u, x, y, count, means, factors, NO_ACTIVATION);
    }
}

/* The whole problem: x, scale or NULL, shift or NULL, y, and a workspace of 2 * channels floats for each image. Settings: images,
 * pixels of one, channels, channels of a group, groups of a unit, threads, activation, and the bits of eps. */
void NAMED(convoy_group_norm)(const int64_t *settings, void *const *tensors) {
    int64_t images = settings[0], pixels = settings[1], channels = settings[2], size = settings[3], threads = settings[5];
    union {
        int32_t bits;
        float value;
    } eps = {.bits = (int32_t)settings[7]};
    const stored *x = tensors[0];
    const float *scale = tensors[1], *shift = tensors[2];
    stored *y = tensors[3];
    float *sums = tensors[4];
    int64_t each = settings[4] * size, units = up(channels, each);
    threads = most(1, least(threads, images * pixels * channels / WORTH_A_THREAD));
    PARALLEL_FOR(unit, images * units, threads) {
        int64_t first = unit % units * each, image = unit / units, at = image * pixels * channels + first;
        Norm u = {scale ? scale + first : 0, shift ? shift + first : 0, pixels, channels, size, eps.value};
        float *means = sums + image * 2 * channels + first;
        norm_unit(&u, x + at, y + at, least(each, channels - first), settings[6], means, means + channels);
    }
}
