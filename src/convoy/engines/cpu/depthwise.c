/* LANES, the floats of a vector register, and BF16, if values are stored so, are given by the compiler's flags; activated.h stands
 * before this. So may be SIDE, if the function is for filters of one side alone (0: for those without a loop of their own), and
 * DEPTHWISE, its name: a net has filters of one or two sides, and a loop takes as long to compile as all that is around it.
 *
 * A depthwise forward convolution in NHWC, computed in fp32, one filter a channel, with bias, residual and activation.
 *
 * A unit is one row of the result. It takes a register of channels at a time along the whole row, so that their weights stay in
 * registers; the last register of channels begins so early that it is full.
 *
 * Weights: [r][s][c]. The order of a sum depends on the problem alone.
 */
#define MOST_TAPS 49
#define BLOCK 4 /* pixels of 3x3 and 5x5 filters done together: with the nine taps their sums and inputs fit the registers */
#ifdef SIDE
#define HAS(side) (SIDE == (side))
#else
#define HAS(side) 1
#endif
#ifndef DEPTHWISE
#define DEPTHWISE NAMED(convoy_depthwise)
#endif
#define WIDE 7  /* pixels of 7x7 filters done together */

typedef struct {
    int64_t n, c, h, w, k, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, p, q;
    int64_t activation, residual, threads;
} Sizes;

typedef struct {
    const Sizes *z;
    const stored *x, *residual; /* the image; the row */
    const float *weight, *bias;
    stored *y;                             /* the row */
    int64_t top, first_r, last_r;              /* input row of the first tap; taps whose rows lie within the image */
} Row;

/* `width` channels: LANES of them, or one. */
INLINE vec loaded(const float *from, const int width) { return width == LANES ? *(const vec *)from : all_lanes(*from); }
INLINE vec loaded_value(const stored *from, const int width) {
    return width == LANES ? stored_lanes(from) : all_lanes(from_stored(*from));
}

/* Some pixels' sums, to value `at` of the row and on. */
INLINE void finish(const Row *u, vec *sums, const int pixels, int64_t at) {
    const Sizes *z = u->z;
    if (z->residual)
        UNROLLED for (int i = 0; i < pixels; i++) sums[i] += stored_lanes(u->residual + at + i * z->c);
    activate_for_storage(sums, pixels, z->activation);
    UNROLLED for (int i = 0; i < pixels; i++) put_stored_lanes(u->y + at + i * z->c, sums[i]);
}

/* BLOCK pixels from `q` on, without dilation: their inputs overlap, and their sums need not wait for each other. Where they are not
 * `whole`, some of them have taps outside the image. */
INLINE void block(const Row *u, int64_t c, int64_t q, const vec *taps, vec bias, const int side, const int stride, const int whole) {
    const Sizes *z = u->z;
    int64_t left = q * stride - z->pad_w;
    vec sums[BLOCK], x[(BLOCK - 1) * 2 + 5];
    UNROLLED for (int i = 0; i < BLOCK; i++) sums[i] = bias;
    UNROLLED for (int r = 0; r < side; r++) {
        if (!whole && (r < u->first_r || r >= u->last_r)) continue;
        const stored *row = u->x + ((u->top + r) * z->w + left) * z->c + c;
        UNROLLED for (int i = 0; i < (BLOCK - 1) * stride + side; i++)
            x[i] = whole || (left + i >= 0 && left + i < z->w) ? stored_lanes(row + i * z->c) : all_lanes(0.0f);
        UNROLLED for (int i = 0; i < BLOCK; i++)
            UNROLLED for (int s = 0; s < side; s++) sums[i] += x[i * stride + s] * taps[r * side + s];
    }
    finish(u, sums, BLOCK, q * z->c + c);
}

/* All pixels of the row in blocks, the last of which begins so early that it is whole. */
INLINE void blocks(const Row *u, int64_t c, const vec *taps, vec bias, const int side, const int stride) {
    const Sizes *z = u->z;
    for (int64_t q = 0; q < z->q; q += BLOCK) {
        q = least(q, z->q - BLOCK);
        int64_t left = q * stride - z->pad_w;
        if (left >= 0 && left + (BLOCK - 1) * stride + side <= z->w && u->last_r - u->first_r == side)
            block(u, c, q, taps, bias, side, stride, 1);
        else
            block(u, c, q, taps, bias, side, stride, 0);
    }
}

/* WIDE pixels of 7x7 filters from `q` on at stride 1: their sums, a row of taps and an input fill 16 registers. Each input is added to
 * all sums that it belongs to, and left out where it lies outside the image. */
INLINE void wide_block(const Row *u, int64_t c, int64_t q, vec bias, const int whole) {
    const Sizes *z = u->z;
    int64_t left = q - z->pad_w;
    vec sums[WIDE];
    UNROLLED for (int i = 0; i < WIDE; i++) sums[i] = bias;
    for (int64_t r = u->first_r; r < u->last_r; r++) {
        const stored *row = u->x + ((u->top + r) * z->w + left) * z->c + c;
        const float *weight = u->weight + r * 7 * z->c + c;
        vec taps[7];
        UNROLLED for (int s = 0; s < 7; s++) taps[s] = *(const vec *)(weight + s * z->c);
        UNROLLED for (int i = 0; i < WIDE + 6; i++) {
            if (!whole && (left + i < 0 || left + i >= z->w)) continue;
            vec x = stored_lanes(row + i * z->c);
            UNROLLED for (int s = 0; s < 7; s++)
                if (i - s >= 0 && i - s < WIDE) sums[i - s] += x * taps[s];
        }
    }
    finish(u, sums, WIDE, q * z->c + c);
}

/* All pixels of the row in such blocks, the last of which begins so early that it is whole. */
INLINE void wide_blocks(const Row *u, int64_t c, vec bias) {
    const Sizes *z = u->z;
    for (int64_t q = 0; q < z->q; q += WIDE) {
        q = least(q, z->q - WIDE);
        if (q >= z->pad_w && q - z->pad_w + WIDE + 6 <= z->w)
            wide_block(u, c, q, bias, 1);
        else
            wide_block(u, c, q, bias, 0);
    }
}

/* All pixels of the row one by one. */
INLINE void pixels(const Row *u, int64_t c, const vec *taps, vec bias, const int width) {
    const Sizes *z = u->z;
    for (int64_t q = 0; q < z->q; q++) {
        int64_t left = q * z->stride_w - z->pad_w;
        int64_t first_s = left < 0 ? up(-left, z->dilation_w) : 0;
        int64_t last_s = most(first_s, least(z->s, up(z->w - left, z->dilation_w)));
        vec sum = bias;
        for (int64_t r = u->first_r; r < u->last_r; r++)
            for (int64_t s = first_s; s < last_s; s++) {
                int64_t at = (u->top + r * z->dilation_h) * z->w + left + s * z->dilation_w;
                sum += loaded_value(u->x + at * z->c + c, width) * taps[r * z->s + s];
            }
        if (z->residual) sum += loaded_value(u->residual + q * z->c + c, width);
        sum = activated_for_storage(sum, z->activation);
        if (width == LANES)
            put_stored_lanes(u->y + q * z->c + c, sum);
        else
            u->y[q * z->c + c] = to_stored(sum[0]);
    }
}

/* Some channels of the row. */
INLINE void channels(const Row *u, int64_t c, const int width) {
    const Sizes *z = u->z;
    vec taps[MOST_TAPS], bias = loaded(u->bias + c, width);
    int64_t plain = z->dilation_h * z->dilation_w == 1 && z->r == z->s && width == LANES;
    if (HAS(7) && plain && z->r == 7 && z->stride_w == 1 && z->q >= WIDE) {
        wide_blocks(u, c, bias);
        return;
    }
    for (int64_t tap = 0; tap < z->r * z->s; tap++) taps[tap] = loaded(u->weight + tap * z->c + c, width);
    int64_t side = plain && z->q >= BLOCK ? z->r : 0;
    if (HAS(3) && side == 3 && z->stride_w == 1)
        blocks(u, c, taps, bias, 3, 1);
    else if (HAS(3) && side == 3 && z->stride_w == 2)
        blocks(u, c, taps, bias, 3, 2);
    else if (HAS(5) && side == 5 && z->stride_w == 1)
        blocks(u, c, taps, bias, 5, 1);
    else if (HAS(5) && side == 5 && z->stride_w == 2)
        blocks(u, c, taps, bias, 5, 2);
    else
        pixels(u, c, taps, bias, width);
}

/* A row of the result. */
NOT_INLINED void add_row(const Sizes *z, void *const *tensors, int64_t row) {
    const stored *x = tensors[0], *residual = tensors[3];
    stored *y = tensors[4];
    int64_t at = row * z->q * z->c;
    Row u = {.z = z, .x = x + row / z->p * z->h * z->w * z->c, .weight = tensors[1], .bias = tensors[2], .y = y + at};
    u.residual = residual ? residual + at : 0;
    u.top = row % z->p * z->stride_h - z->pad_h;
    u.first_r = u.top < 0 ? least(z->r, up(-u.top, z->dilation_h)) : 0;
    u.last_r = u.top < z->h ? most(u.first_r, least(z->r, up(z->h - u.top, z->dilation_h))) : u.first_r;
    if (z->c < LANES)
        for (int64_t c = 0; c < z->c; c++) channels(&u, c, 1);
    else
        for (int64_t c = 0; c < z->c; c += LANES) channels(&u, least(c, z->c - LANES), LANES);
    smooth_stored_rows(u.y, 0, 1, z->q * z->c, z->activation);
}

/* The whole problem: x, weight, bias, residual or NULL, and y. */
void DEPTHWISE(const Sizes *z, void *const *tensors) {
    int64_t rows = z->n * z->p;
    EACH_ITEM(row, rows, least(z->threads, rows), add_row(z, tensors, row));
}
