/* A copy between NCHW and NHWC: each image's channels by pixels, turned over. Values of 1, 2, 4 or 8 bytes.
 *
 * A unit is some pixels of an image. Few channels, an image's, are side by side at once; more go in squares that a cache holds.
 *
 * BYTES may be given by the compiler's flags, if the function is for values of that size alone, and LAYOUT, its name.
 */
#ifdef BYTES
#define HAS(bytes) (BYTES == (bytes))
#else
#define HAS(bytes) 1
#endif
#ifndef LAYOUT
#define LAYOUT convoy_layout
#endif

#define INLINE static inline __attribute__((always_inline))
#define PIXELS 2048 /* of a unit */
#define SIDE 16     /* of a square */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#define COPY(NAME, TYPE)                                                                                                     \
    INLINE void square_##NAME(const TYPE *x, TYPE *y, int64_t channels, int64_t pixels, int64_t first, int64_t last,         \
                              int64_t first_c, int64_t last_c, const int to_nhwc) {                                          \
        if (to_nhwc)                                                                                                         \
            for (int64_t p = first; p < last; p++)                                                                           \
                for (int64_t c = first_c; c < last_c; c++) y[p * channels + c] = x[c * pixels + p];                          \
        else                                                                                                                 \
            for (int64_t c = first_c; c < last_c; c++)                                                                       \
                for (int64_t p = first; p < last; p++) y[c * pixels + p] = x[p * channels + c];                              \
    }                                                                                                                        \
    static void copy_##NAME(const TYPE *x, TYPE *y, int64_t channels, int64_t pixels, int64_t first, int64_t last,           \
                            int64_t to_nhwc) {                                                                               \
        if (channels == 3 && to_nhwc)                                                                                        \
            square_##NAME(x, y, 3, pixels, first, last, 0, 3, 1);                                                            \
        else                                                                                                                 \
            for (int64_t p = first; p < last; p += SIDE)                                                                     \
                for (int64_t c = 0; c < channels; c += SIDE) {                                                               \
                    int64_t end = least(last, p + SIDE), end_c = least(channels, c + SIDE);                                  \
                    if (to_nhwc)                                                                                             \
                        square_##NAME(x, y, channels, pixels, p, end, c, end_c, 1);                                          \
                    else                                                                                                     \
                        square_##NAME(x, y, channels, pixels, p, end, c, end_c, 0);                                          \
                }                                                                                                            \
    }

COPY(1, uint8_t)
COPY(2, uint16_t)
COPY(4, uint32_t)
COPY(8, uint64_t)

/* The whole problem: x and y. Settings: images, channels, pixels, whether to NHWC, bytes of a value, threads. */
void LAYOUT(const int64_t *settings, void *const *tensors) {
    int64_t images = settings[0], channels = settings[1], pixels = settings[2], to_nhwc = settings[3], bytes = settings[4];
    int64_t parts = (pixels + PIXELS - 1) / PIXELS, units = images * parts;
    PARALLEL_FOR(unit, units, least(settings[5], units)) {
        int64_t at = unit / parts * channels * pixels * bytes, first = unit % parts * PIXELS;
        const void *x = (const char *)tensors[0] + at;
        void *y = (char *)tensors[1] + at;
        int64_t last = least(pixels, first + PIXELS);
        switch (bytes) {
        case 1: if (HAS(1)) copy_1(x, y, channels, pixels, first, last, to_nhwc); break;
        case 2: if (HAS(2)) copy_2(x, y, channels, pixels, first, last, to_nhwc); break;
        case 4: if (HAS(4)) copy_4(x, y, channels, pixels, first, last, to_nhwc); break;
        case 8: if (HAS(8)) copy_8(x, y, channels, pixels, first, last, to_nhwc); break;
        }
    }
}
