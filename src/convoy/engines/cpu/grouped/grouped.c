/* CIN and KOUT, the input and output channels of a group, STRIDE, of the columns (0: any), LANES, whose multiple KOUT is, PIXELS, of a
 * block at most, GROUPED, the function's name, and BF16, if values are stored so, are given by the compiler's flags; activated.h stands
 * before this.
 *
 * A grouped forward convolution in NHWC, computed in fp32, with bias, residual and activation.
 *
 * A unit is a band of an image's rows by one group. The group's input values are copied to a place of their own, with zeros around the
 * image, where the values of a pixel lie beside the next pixel's. So no tap is at a border, and the compiler knows how far all pixels of
 * a block lie from the first one. The sums of a block stay in registers while taps and input channels go by.
 *
 * Weights: [group][r][s][CIN][KOUT]. The order of a sum depends on the problem alone.
 */
#define VECTORS (KOUT / LANES)

typedef struct {
    int64_t n, c, h, w, k, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, p, q, groups;
    int64_t activation, residual, bands, width, threads, slot_floats;
} Sizes;

typedef struct {
    const Sizes *z;
    const float *x, *weight, *bias; /* the input at the first tap of the row's first pixel */
    const stored *residual;         /* of the row */
    stored *y;
} Row;

/* Input row `row` of a group, which may lie outside the image, to `width` pixels. */
INLINE void copied_row(const Sizes *z, const stored *image, int64_t row, float *to) {
    if (row < 0 || row >= z->h) {
        for (int64_t i = 0; i < z->width * CIN; i++) to[i] = 0.0f;
        return;
    }
    const stored *from = image + row * z->w * z->c;
    int64_t inside = least(z->w, z->width - z->pad_w);
    for (int64_t i = 0; i < z->pad_w * CIN; i++) to[i] = 0.0f;
    to += z->pad_w * CIN;
    for (int64_t column = 0; column < inside; column++, from += z->c, to += CIN) {
        UNROLLED for (int c = 0; c < CIN / LANES; c++) *(vec *)(to + c * LANES) = stored_lanes(from + c * LANES);
        UNROLLED for (int c = CIN / LANES * LANES; c < CIN; c++) to[c] = from_stored(from[c]);
    }
    for (int64_t i = 0; i < (z->width - z->pad_w - inside) * CIN; i++) to[i] = 0.0f;
}

/* Some pixels of the row, from `q` on. */
INLINE void block(const Row *u, const int pixels, int64_t q) {
    const Sizes *z = u->z;
    const int64_t step = (STRIDE ? STRIDE : z->stride_w) * CIN;
    const float *weight = u->weight;
    vec sums[PIXELS][VECTORS];
    UNROLLED for (int i = 0; i < pixels; i++)
        UNROLLED for (int v = 0; v < VECTORS; v++) sums[i][v] = *(const vec *)(u->bias + v * LANES);
    for (int64_t r = 0; r < z->r; r++) {
        const float *x = u->x + r * z->dilation_h * z->width * CIN + q * step;
        for (int64_t s = 0; s < z->s; s++, x += z->dilation_w * CIN)
            for (int c = 0; c < CIN; c++, weight += KOUT) {
                vec row[VECTORS];
                UNROLLED for (int v = 0; v < VECTORS; v++) row[v] = *(const vec *)(weight + v * LANES);
                UNROLLED for (int i = 0; i < pixels; i++) {
                    vec value = all_lanes(x[i * step + c]);
                    UNROLLED for (int v = 0; v < VECTORS; v++) sums[i][v] += value * row[v];
                }
            }
    }
    int64_t at = q * z->k;
    if (z->residual)
        UNROLLED for (int i = 0; i < pixels; i++)
            UNROLLED for (int v = 0; v < VECTORS; v++) sums[i][v] += stored_lanes(u->residual + at + i * z->k + v * LANES);
    UNROLLED for (int i = 0; i < pixels; i++) activate_for_storage(sums[i], VECTORS, z->activation);
    UNROLLED for (int i = 0; i < pixels; i++)
        UNROLLED for (int v = 0; v < VECTORS; v++) put_stored_lanes(u->y + at + i * z->k + v * LANES, sums[i][v]);
}

/* All pixels of the row, in blocks of about the same size. */
NOT_INLINED void add_row(const Row *u) {
    int64_t pixels = u->z->q, blocks = up(pixels, PIXELS);
    for (int64_t i = 0; i < blocks; i++) {
        int64_t first = pixels * i / blocks, count = pixels * (i + 1) / blocks - first;
        switch (count) {
#define BLOCK(size) case size: if (size <= PIXELS) block(u, size <= PIXELS ? size : 1, first); break;
        BLOCK(1) BLOCK(2) BLOCK(3) BLOCK(4) BLOCK(5) BLOCK(6) BLOCK(7) BLOCK(8) BLOCK(9) BLOCK(10) BLOCK(11) BLOCK(12)
        }
    }
    smooth_stored_rows(u->y, u->z->k, pixels, KOUT, u->z->activation);
}

/* A band of an image's rows by a group. */
NOT_INLINED void add_unit(const Sizes *z, void *const *tensors, int64_t unit) {
    const stored *x = tensors[0], *residual = tensors[3];
    float *slot = (float *)tensors[5] + THREAD_NUMBER() * z->slot_floats;
    int64_t group = unit % z->groups, band = unit / z->groups % z->bands, image = unit / z->groups / z->bands;
    int64_t first = z->p * band / z->bands, last = z->p * (band + 1) / z->bands;
    int64_t top = first * z->stride_h - z->pad_h, rows = (last - first - 1) * z->stride_h + (z->r - 1) * z->dilation_h + 1;
    const stored *values = x + image * z->h * z->w * z->c + group * CIN;
    for (int64_t row = 0; row < rows; row++) copied_row(z, values, top + row, slot + row * z->width * CIN);
    Row u = {.z = z, .weight = (const float *)tensors[1] + group * z->r * z->s * CIN * KOUT};
    u.bias = (const float *)tensors[2] + group * KOUT;
    for (int64_t p = first; p < last; p++) {
        int64_t at = (image * z->p + p) * z->q * z->k + group * KOUT;
        u.x = slot + (p - first) * z->stride_h * z->width * CIN;
        u.residual = residual ? residual + at : 0;
        u.y = (stored *)tensors[4] + at;
        add_row(&u);
    }
}

/* The whole problem: x, weight, bias, residual or NULL, y, and `threads` slots of `slot_floats`. */
void GROUPED(const Sizes *z, void *const *tensors) {
    int64_t units = z->n * z->bands * z->groups;
    EACH_ITEM(unit, units, least(z->threads, units), add_unit(z, tensors, unit));
}
