/* LANES, the floats of a vector register, and BF16, if values are stored so, are given by the compiler's flags; activated.h stands
 * before this.
 *
 * A pooling by itself in NHWC: maximum or average, any window, stride and padding.
 *
 * A unit is one row of the result and one block of channels. The rows of its window are reduced to one first, then, for each
 * pixel of the result, the columns: window_h + window_w values are looked at instead of window_h * window_w. The reduced row
 * stays in the first cache. A flat result is in NCHW, for what reads each image's values as a row.
 */

#define BLOCK_FLOATS 4096 /* of a reduced row: 16 KB, half of a first cache or less */
#define WORTH_A_THREAD 16384 /* values that a thread must get for its start to be worth it */

typedef struct {
    int64_t n, c, h, w, y_h, y_w;
    int64_t average, window_h, window_w, stride_h, stride_w, pad_h, pad_w, count_include_pad;
    int64_t block_c, threads, flat;
} Sizes;

/* A maximum takes NaN over every number. */
INLINE float joined(float a, float b, int average) { return average ? a + b : (b > a || b != b) ? b : a; }

/* to = several runs of values, a step apart, joined; of two and three without a look back at to. */
#define JOIN(name, type, number)                                                                                             \
    INLINE void name(float *restrict to, const type *restrict from, int64_t step, int64_t runs, int64_t count, int average) { \
        const type *second = from + step, *third = from + 2 * step;                                                           \
        if (runs == 1)                                                                                                        \
            for (int64_t i = 0; i < count; i++) to[i] = number(from[i]);                                                      \
        else if (runs == 2)                                                                                                   \
            for (int64_t i = 0; i < count; i++) to[i] = joined(number(from[i]), number(second[i]), average);                  \
        else                                                                                                                  \
            for (int64_t i = 0; i < count; i++)                                                                               \
                to[i] = joined(joined(number(from[i]), number(second[i]), average), number(third[i]), average);               \
        for (int64_t run = 3; run < runs; run++)                                                                              \
            for (int64_t i = 0; i < count; i++) to[i] = joined(to[i], number(from[run * step + i]), average);                 \
    }
#define AS_IT_IS(value) value

JOIN(join_stored, stored, from_stored)
JOIN(join, float, AS_IT_IS)

#define FIRST 3 /* runs that JOIN takes without a look back */
#define MORE 4

/* Further runs, up to MORE of them, joined to what is there. */
INLINE void join_more(float *restrict to, const stored *restrict from, int64_t step, int64_t runs, int64_t count, int average) {
    if (runs == MORE)
        for (int64_t i = 0; i < count; i++) {
            float value = to[i];
            UNROLLED for (int run = 0; run < MORE; run++) value = joined(value, from_stored(from[run * step + i]), average);
            to[i] = value;
        }
    else
        for (int64_t run = 0; run < runs; run++)
            for (int64_t i = 0; i < count; i++) to[i] = joined(to[i], from_stored(from[run * step + i]), average);
}

/* Some rows of some columns, joined column by column. All columns of a few rows come before the next rows: memory is read as it
 * lies, although a large window's rows are far apart. */
INLINE void join_rows(const Sizes *s, float *to, const stored *from, int64_t rows, int64_t columns, int64_t channels, int average) {
    int64_t step = s->w * s->c;
    for (int64_t k = 0; k < columns; k++)
        join_stored(to + k * s->block_c, from + k * s->c, step, least(FIRST, rows), channels, average);
    for (int64_t row = FIRST; row < rows; row += MORE)
        for (int64_t k = 0; k < columns; k++)
            join_more(to + k * s->block_c, from + row * step + k * s->c, step, least(MORE, rows - row), channels, average);
}

/* Where a pixel of the result is computed: where it is stored, or, to be rounded, in `apart`. */
INLINE float *direct(stored *at, float *apart) {
#ifdef BF16
    return apart;
#else
    return at;
#endif
}

INLINE void unit(const Sizes *s, const stored *x, stored *y, int64_t row, int64_t channel, int average) {
    float reduced[BLOCK_FLOATS], pixel[BLOCK_FLOATS];
    int64_t channels = least(s->block_c, s->c - channel);
    int64_t image = row / s->y_h, top = row % s->y_h * s->stride_h - s->pad_h;
    int64_t first = most(top, 0), last = least(top + s->window_h, s->h);
    const stored *rows = x + (image * s->h * s->w) * s->c + channel;
    stored *at = y + row * s->y_w * s->c + channel;
    stored *plane = y + ((image * s->c + channel) * s->y_h + row % s->y_h) * s->y_w;
    int64_t across = BLOCK_FLOATS / s->block_c; /* columns that are reduced at a time */
    int64_t seen = 0, held = 0;                 /* columns from seen on, so many, lie in reduced */
    for (int64_t column = 0; column < s->y_w; column++, at += s->c) {
        float *to = s->flat ? pixel : direct(at, pixel);
        int64_t left = column * s->stride_w - s->pad_w;
        int64_t begin = most(left, 0), end = least(left + s->window_w, s->w);
        if (end > seen + held) {
            seen = begin;
            held = least(across, s->w - begin);
            join_rows(s, reduced, rows + (first * s->w + seen) * s->c, last - first, held, channels, average);
        }
        join(to, reduced + (begin - seen) * s->block_c, s->block_c, end - begin, channels, average);
        if (average) {
            int64_t bottom = least(top + s->window_h, s->h + s->pad_h), right = least(left + s->window_w, s->w + s->pad_w);
            int64_t count = s->count_include_pad ? (bottom - top) * (right - left) : (last - first) * (end - begin);
            for (int64_t i = 0; i < channels; i++) to[i] /= (float)count;
        }
        if (s->flat)
            for (int64_t i = 0; i < channels; i++) plane[i * s->y_h * s->y_w + column] = to_stored(pixel[i]);
        else if (to == pixel)
            for (int64_t i = 0; i < channels; i++) at[i] = to_stored(pixel[i]);
    }
}

/* The whole problem: x and y. */
void NAMED(convoy_pooling)(const Sizes *s, void *const *tensors) {
    const stored *x = tensors[0];
    stored *y = tensors[1];
    int64_t rows = s->n * s->y_h, blocks = (s->c + s->block_c - 1) / s->block_c;
    int64_t wanted = s->n * s->c * s->h * s->w / WORTH_A_THREAD;
    int threads = (int)most(1, least(s->threads, wanted));
    PARALLEL_FOR(at, rows * blocks, threads) {
        if (s->average)
            unit(s, x, y, at / blocks, at % blocks * s->block_c, 1);
        else
            unit(s, x, y, at / blocks, at % blocks * s->block_c, 0);
    }
}
