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
