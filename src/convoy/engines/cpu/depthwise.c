/* LANES, the floats of a vector register, is given by the compiler's flags; activated.h stands before this.
 *
 * A depthwise forward convolution in NHWC, fp32, one filter a channel, with bias, residual and activation.
 *
 * A unit is one row of the result. It takes a register of channels at a time along the whole row, so that their weights stay in
 * registers; the last register of channels begins so early that it is full.
 *
 * Weights: [r][s][c]. The order of a sum depends on the problem alone.
 */
#define MOST_TAPS 49

typedef struct {
    int64_t n, c, h, w, k, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, p, q;
    int64_t activation, residual, threads;
} Sizes;

typedef struct {
    const Sizes *z;
    const float *x, *weight, *bias, *residual; /* x: the image; residual: the row */
    float *y;                                  /* the row */
    int64_t top, first_r, last_r;              /* input row of the first tap; taps whose rows lie within the image */
} Row;

/* `width` channels from `c` on: LANES of them, or one. The taps [first_s, last_s) of each pixel lie within the row. */
INLINE vec loaded(const float *from, const int width) { return width == LANES ? *(const vec *)from : all_lanes(*from); }

INLINE void run(const Row *u, int64_t c, int64_t first, int64_t last, int64_t first_s, int64_t last_s, const vec *taps, vec bias,
                const int rows, const int columns, const int width) {
    const Sizes *z = u->z;
    for (int64_t q = first; q < last; q++) {
        vec sum = bias;
        const float *x = u->x + (u->top * z->w + q * z->stride_w - z->pad_w) * z->c + c;
        for (int64_t r = rows ? 0 : u->first_r; r < (rows ? rows : u->last_r); r++)
            for (int64_t s = columns ? 0 : first_s; s < (columns ? columns : last_s); s++)
                sum += loaded(x + (r * z->dilation_h * z->w + s * z->dilation_w) * z->c, width) * taps[r * z->s + s];
        if (z->residual) sum += loaded(u->residual + q * z->c + c, width);
        sum = activated(sum, z->activation);
        if (width == LANES)
            *(vec *)(u->y + q * z->c + c) = sum;
        else
            u->y[q * z->c + c] = sum[0];
    }
}

/* All pixels of the row, some channels: those at the borders one by one. */
INLINE void channels(const Row *u, int64_t c, const int width) {
    const Sizes *z = u->z;
    vec taps[MOST_TAPS], bias = loaded(u->bias + c, width);
    for (int64_t tap = 0; tap < z->r * z->s; tap++) taps[tap] = loaded(u->weight + tap * z->c + c, width);
    int64_t reach = (z->s - 1) * z->dilation_w;
    int64_t begin = least(z->q, up(z->pad_w, z->stride_w));
    int64_t room = z->w + z->pad_w - reach; /* input columns at which a whole filter row may begin */
    int64_t end = most(begin, room > 0 ? least(z->q, up(room, z->stride_w)) : 0);
    for (int64_t q = 0; q < z->q; q++) {
        if (q == begin) q = end;
        if (q >= z->q) break;
        int64_t left = q * z->stride_w - z->pad_w;
        int64_t first_s = left < 0 ? up(-left, z->dilation_w) : 0;
        int64_t last_s = most(first_s, least(z->s, up(z->w - left, z->dilation_w)));
        run(u, c, q, q + 1, first_s, last_s, taps, bias, 0, 0, width);
    }
    if (z->r == 3 && z->s == 3 && u->first_r == 0 && u->last_r == 3)
        run(u, c, begin, end, 0, 3, taps, bias, 3, 3, width);
    else
        run(u, c, begin, end, 0, z->s, taps, bias, 0, 0, width);
}

/* The whole problem: x, weight, bias, residual or NULL, and y. */
void convoy_depthwise(const Sizes *z, void *const *tensors) {
    const float *x = tensors[0], *weight = tensors[1], *bias = tensors[2], *residual = tensors[3];
    float *y = tensors[4];
    int64_t units = z->n * z->p;
#pragma omp parallel for schedule(static) num_threads((int)least(z->threads, units))
    for (int64_t unit = 0; unit < units; unit++) {
        int64_t at = unit * z->q * z->c;
        Row u = {.z = z, .x = x + unit / z->p * z->h * z->w * z->c, .weight = weight, .bias = bias, .y = y + at};
        u.residual = residual ? residual + at : 0;
        u.top = unit % z->p * z->stride_h - z->pad_h;
        u.first_r = u.top < 0 ? least(z->r, up(-u.top, z->dilation_h)) : 0;
        u.last_r = u.top < z->h ? most(u.first_r, least(z->r, up(z->h - u.top, z->dilation_h))) : u.first_r;
        if (z->c < LANES)
            for (int64_t c = 0; c < z->c; c++) channels(&u, c, 1);
        else
            for (int64_t c = 0; c < z->c; c += LANES) channels(&u, least(c, z->c - LANES), LANES);
    }
}
