/* LANES, the floats of a vector register, and BF16, if values are stored so, are given by the compiler's flags; activated.h and layer.h
 * stand before this.
 *
 * A depthwise convolution and the mean of its result over each image, as before the layers of squeeze-and-excitation. A row's pixels are
 * added while the first cache has them; then the rows' sums are. The order of a sum depends on the problem alone.
 */
typedef struct {
    int64_t images, threads;
    Layer layer;
} Mean;

#define VECTORS 4            /* registers of channels that are added side by side */
#define WORTH_A_THREAD 16384 /* sums that a thread must get for its start to be worth it */

/* The sums of a row's pixels. */
static void add_pixels(float *sums, const stored *row, int64_t pixels, int64_t channels) {
    int64_t c = 0;
    for (; c + VECTORS * LANES <= channels; c += VECTORS * LANES) {
        vec held[VECTORS];
        for (int v = 0; v < VECTORS; v++) held[v] = all_lanes(0.0f);
        for (int64_t q = 0; q < pixels; q++)
            for (int v = 0; v < VECTORS; v++) held[v] += stored_lanes(row + q * channels + c + v * LANES);
        for (int v = 0; v < VECTORS; v++) *(vec *)(sums + c + v * LANES) = held[v];
    }
    for (; c < channels; c++) {
        sums[c] = 0.0f;
        for (int64_t q = 0; q < pixels; q++) sums[c] += from_stored(row[q * channels + c]);
    }
}

/* The mean of LANES channels, or of one, from all rows' sums. */
INLINE void put_mean(stored *mean, const float *sums, int64_t rows, int64_t channels, const int width, float pixels) {
    vec total = all_lanes(0.0f);
    for (int64_t row = 0; row < rows; row++, sums += channels) total += width == LANES ? *(const vec *)sums : all_lanes(*sums);
    total /= all_lanes(pixels);
    if (width == LANES)
        put_stored_lanes(mean, total);
    else
        *mean = to_stored(total[0]);
}

/* x, y, mean, the rows' sums, and the kernel's own tensors. */
void NAMED(convoy_depthwise_mean)(const Mean *z, void *const *tensors) {
    const Layer *s = &z->layer;
    int64_t c = s->settings[C], h = s->settings[H], w = s->settings[W], p = s->settings[P], q = s->settings[Q];
    const stored *x = tensors[0];
    stored *y = tensors[1], *mean = tensors[2];
    float *sums = tensors[3];
    PARALLEL_FOR(unit, z->images * p, least(z->threads, z->images * p)) {
        Rows made = {unit % p, unit % p + 1};
        const stored *from = x + (unit / p * h + read_by(s->settings, made).first) * w * c;
        ALONE(call_layer(s, made, from, 0, y + unit * q * c, tensors + 4));
        add_pixels(sums + unit * c, y + unit * q * c, q, c);
    }
    MEET();
    int64_t parts = up(c, LANES), threads = most(1, least(z->threads, z->images * p * c / WORTH_A_THREAD));
    PARALLEL_FOR(part, z->images * parts, threads) {
        int64_t image = part / parts, first = part % parts * LANES, end = least(first + LANES, c);
        const float *from = sums + image * p * c;
        if (end - first == LANES)
            put_mean(mean + image * c + first, from + first, p, c, LANES, (float)(p * q));
        else
            for (; first < end; first++) put_mean(mean + image * c + first, from + first, p, c, 1, (float)(p * q));
    }
}
