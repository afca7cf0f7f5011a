/* LANES, the floats of a vector register, VECTORS, the registers of a tile, PIXELS, of a block, and BF16, if values are stored so, are
 * given by the compiler's flags; activated.h stands before this.
 *
 * A dense forward convolution in NHWC, computed in fp32, with bias, residual and activation.
 *
 * A block is some pixels of the result by one tile of output channels; its sums stay in registers while taps and input channels
 * go by, and an input value is multiplied with all of the tile at once. Where a filter row lies within the image for all pixels
 * of a block, its columns and channels are one run of values; at the borders each tap is a run, of zeros where it lies outside.
 *
 * A unit is a band of blocks by a group of tiles, the first and the last of which it may share with another unit, so that all
 * have as many registers of channels to do. Where a tile's weights are more than the second cache should hold, a unit takes
 * them in parts, all blocks of the band by one part and then the next, and the sums wait in the workspace. While a part is in
 * use the one that follows it in memory is fetched, so that weights come from memory as fast as they are used.
 *
 * Weights: [tile][r][s][c][TILE], a tile's missing channels zero. The order of a sum depends on the problem alone.
 */
#define TILE (VECTORS * LANES)
#define LINE 16         /* floats of a line of the cache */
#define SOON (2 * LINE) /* so far ahead of its use an input value is fetched */
#define POINTS 16       /* more than PIXELS */

typedef struct {
    int64_t n, c, h, w, k, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, p, q;
    int64_t activation, residual;
    int64_t bands, groups, part_r, part_c, threads, slot_floats;
} Sizes;

typedef struct {
    const Sizes *z;
    const stored *image, *zeros, *residual; /* of one image and tile */
    const float *weight, *bias;
    stored *y;
    float *held;                                           /* [pixels of the band][TILE] */
    const char *ahead;                                     /* a block's share of the weights that follow this part's */
    int64_t step;                                          /* bytes of it for each input value */
    int64_t channels;                                      /* of the tile that are done here */
    int64_t first_r, last_r, first_c, last_c;              /* this part */
    int64_t begins, ends;                                  /* whether it is the first, the last */
} Work;

/* sums += a run of values of each pixel, times the weight's rows. */
INLINE void add_run(const int pixels, const int vectors, vec sums[PIXELS][VECTORS], const stored *const *x, int64_t length,
                    const float *weight, const char *ahead, int64_t step) {
    for (int64_t c = 0; c < length; c++) {
        vec row[VECTORS];
        __builtin_prefetch(ahead + c * step, 0, 2);
        __builtin_prefetch(x[c % LINE] + c + SOON, 0, 3);
        UNROLLED for (int v = 0; v < vectors; v++) row[v] = *(const vec *)(weight + c * TILE + v * LANES);
        UNROLLED for (int i = 0; i < pixels; i++) {
            vec value = all_lanes(from_stored(x[i][c]));
            UNROLLED for (int v = 0; v < vectors; v++) sums[i][v] += value * row[v];
        }
    }
}

/* The epilogue of a block whose last register of channels is not full: rare, and so neither unrolled nor compiled for every number of
 * pixels. */
static __attribute__((noinline)) void finish_some(const Work *u, int64_t first, int64_t pixels, const vec *sums) {
    const Sizes *z = u->z;
    for (int64_t i = 0; i < pixels; i++, sums += VECTORS) {
        int64_t at = (first + i) * z->k;
        for (int64_t c = 0; c < u->channels; c += LANES) {
            int64_t left = least(LANES, u->channels - c);
            vec value = sums[c / LANES];
            if (z->residual && left == LANES)
                value += stored_lanes(u->residual + at + c);
            else if (z->residual)
                value += first_stored_lanes(u->residual + at + c, left);
            value = activated_for_storage(value, z->activation);
            if (left == LANES)
                put_stored_lanes(u->y + at + c, value);
            else
                put_first_stored_lanes(u->y + at + c, value, left);
        }
    }
}

INLINE void finish(const int pixels, const int vectors, vec sums[PIXELS][VECTORS], const Work *u, int64_t first) {
    const Sizes *z = u->z;
    int64_t at = first * z->k;
    if (u->channels == vectors * LANES) {
        if (z->residual)
            UNROLLED for (int i = 0; i < pixels; i++)
                UNROLLED for (int v = 0; v < vectors; v++) sums[i][v] += stored_lanes(u->residual + at + i * z->k + v * LANES);
        UNROLLED for (int i = 0; i < pixels; i++) activate_for_storage(sums[i], vectors, z->activation);
        UNROLLED for (int i = 0; i < pixels; i++)
            UNROLLED for (int v = 0; v < vectors; v++) put_stored_lanes(u->y + at + i * z->k + v * LANES, sums[i][v]);
    } else {
        vec held[PIXELS][VECTORS];
        UNROLLED for (int i = 0; i < pixels; i++)
            UNROLLED for (int v = 0; v < vectors; v++) held[i][v] = sums[i][v];
        finish_some(u, first, pixels, held[0]);
    }
}

typedef struct {
    const stored *x[LINE];               /* where a run of values begins for each pixel; fewer pixels than LINE: the first pixel's */
    int64_t row[PIXELS], column[PIXELS]; /* of the input, at the first tap */
} Places;

/* Where the pixels from `first` on lie in the input, and whether all taps of this part lie within the image for all of them and a
 * filter row is one run of values: then `x` is at the part's first tap. */
static __attribute__((noinline)) int64_t placed(const Work *u, int64_t first, int64_t pixels, Places *at) {
    const Sizes *z = u->z;
    int64_t p = first / z->q, q = first % z->q, begin = u->first_r * z->dilation_h, reach = (u->last_r - 1) * z->dilation_h;
    int64_t within = z->s == 1 || (z->dilation_w == 1 && u->last_c - u->first_c == z->c);
    for (int64_t i = 0; i < pixels; i++) {
        int64_t row = p * z->stride_h - z->pad_h, column = q * z->stride_w - z->pad_w;
        at->row[i] = row, at->column[i] = column;
        within &= row + begin >= 0 && row + reach < z->h && column >= 0 && column + z->s <= z->w;
        if (++q == z->q) q = 0, p++;
    }
    for (int64_t i = 0; i < LINE && within; i++) {
        int64_t pixel = i < pixels ? i : 0;
        at->x[i] = u->image + ((at->row[pixel] + begin) * z->w + at->column[pixel]) * z->c + u->first_c;
    }
    return within;
}

/* Where one tap's values lie for each pixel: in zeros where it lies outside the image. Whether any lies within. */
static __attribute__((noinline)) int64_t placed_tap(const Work *u, int64_t r, int64_t s, int64_t pixels, Places *at) {
    const Sizes *z = u->z;
    int64_t any = 0;
    for (int64_t i = 0; i < pixels; i++) {
        int64_t row = at->row[i] + r * z->dilation_h, column = at->column[i] + s * z->dilation_w;
        int64_t there = row >= 0 && row < z->h && column >= 0 && column < z->w;
        at->x[i] = there ? u->image + (row * z->w + column) * z->c + u->first_c : u->zeros;
        any |= there;
    }
    for (int64_t i = pixels; i < LINE; i++) at->x[i] = at->x[0];
    return any;
}

/* A part's taps. `within`: all of them lie within the image, and a filter row is one run of values; else each tap is a run. */
INLINE void add_taps(const int pixels, const int vectors, vec sums[PIXELS][VECTORS], const Work *u, Places *at, int64_t within) {
    const Sizes *z = u->z;
    int64_t taps = within ? 1 : z->s, length = (within ? z->s : 1) * (u->last_c - u->first_c);
    int64_t down = z->dilation_h * z->w * z->c;
    const char *ahead = u->ahead;
    for (int64_t r = u->first_r; r < u->last_r; r++)
        for (int64_t s = 0; s < taps; s++, ahead += u->step * length) {
            const float *weight = u->weight + ((r * z->s + s) * z->c + u->first_c) * TILE;
            if (within || placed_tap(u, r, s, pixels, at)) add_run(pixels, vectors, sums, at->x, length, weight, ahead, u->step);
            for (int i = 0; i < LINE && within; i++) at->x[i] += down;
        }
}

/* Whether a filter is one tap, and the pixels of a block are pixels of the input that follow each other. */
INLINE int64_t is_pointwise(const Sizes *z) {
    return z->r * z->s == 1 && z->stride_h * z->stride_w == 1 && z->p == z->h && z->q == z->w && !z->pad_h && !z->pad_w;
}

/* `add_taps` of a block that `is_pointwise`: a step of its loop finds its inputs by two pointers, so that short runs of channels
 * are as fast as long ones. */
INLINE void add_points(const int pixels, const int vectors, vec sums[PIXELS][VECTORS], const Work *u, int64_t first) {
    const int64_t step = u->z->c;
    const stored *x = u->image + first * step + u->first_c, *end = x + u->last_c - u->first_c;
    const float *weight = u->weight + u->first_c * TILE;
    for (const char *ahead = u->ahead; x < end; x++, weight += TILE, ahead += u->step) {
        const stored *fourth = x + 3 * step;
        vec row[VECTORS];
        __builtin_prefetch(ahead, 0, 2);
        UNROLLED for (int v = 0; v < vectors; v++) row[v] = *(const vec *)(weight + v * LANES);
        UNROLLED for (int i = 0; i < pixels; i++) {
            vec value = all_lanes(from_stored(i < 3 ? x[i * step] : fourth[(i - 3) * step]));
            UNROLLED for (int v = 0; v < vectors; v++) sums[i][v] += value * row[v];
        }
    }
}

/* Some pixels from `first` on, which is number `in_band` of its band, by one part of a tile. */
INLINE void add_block(const int pixels, const int vectors, const int points, const Work *u, int64_t first, int64_t in_band) {
    float *held = u->held + in_band * TILE;
    vec sums[PIXELS][VECTORS];
    int64_t next = u->begins ? 0 : TILE;
    const float *begun = u->begins ? u->bias : held;
    UNROLLED for (int i = 0; i < pixels; i++, begun += next)
        UNROLLED for (int v = 0; v < vectors; v++) sums[i][v] = *(const vec *)(begun + v * LANES);
    if (points) {
        add_points(pixels, vectors, sums, u, first);
    } else {
        Places at;
        int64_t within = placed(u, first, pixels, &at);
        add_taps(pixels, vectors, sums, u, &at, within);
    }
    if (u->ends) {
        finish(pixels, vectors, sums, u, first);
        return;
    }
    UNROLLED for (int i = 0; i < pixels; i++)
        UNROLLED for (int v = 0; v < vectors; v++) *(vec *)(held + i * TILE + v * LANES) = sums[i][v];
}

/* One part of a tile, over all blocks of a band: they share its pixels out evenly. The last tile has as many registers as its
 * channels fill. */
INLINE void add_part(const int vectors, Work *u, int64_t first_block, int64_t last_block, int64_t blocks) {
    const Sizes *z = u->z;
    int64_t pixels = z->p * z->q, origin = pixels * first_block / blocks, count = last_block - first_block;
    int64_t floats = (u->last_r - u->first_r) * z->s * (u->last_c - u->first_c) * TILE;
    const char *next = (const char *)(u->weight + (u->first_r * z->s * z->c + u->first_c) * TILE + floats);
    /* Smaller blocks, which only images of fewer than 25 pixels have, go the general way: a second copy of them would take the compiler
     * longer, and no net would gain. */
    int64_t points = is_pointwise(z) && pixels / blocks >= PIXELS - 1 ? POINTS : 0;
    u->step = TILE * sizeof(float) / count;
    for (int64_t block = first_block; block < last_block; block++) {
        int64_t first = pixels * block / blocks, last = pixels * (block + 1) / blocks;
        u->ahead = next + (block - first_block) * floats * sizeof(float) / count;
        switch (last - first + points) {
        case 1: add_block(1, vectors, 0, u, first, first - origin); break;
        case 2: add_block(2, vectors, 0, u, first, first - origin); break;
        case 3: add_block(3, vectors, 0, u, first, first - origin); break;
        case 4: add_block(4, vectors, 0, u, first, first - origin); break;
        case 5: add_block(5, vectors, 0, u, first, first - origin); break;
        case 6: add_block(6, vectors, 0, u, first, first - origin); break;
        case POINTS + 5: add_block(5, vectors, 1, u, first, first - origin); break;
        case POINTS + 6: add_block(6, vectors, 1, u, first, first - origin); break;
        }
    }
}

/* Two objects are compiled from this source at the same time, for half the time: UNIT 1 has the wide tiles and nothing else, UNIT 0 the
 * rest. Without UNIT, all is one object. */
#ifdef UNIT
#define ACROSS __attribute__((noinline, visibility("hidden")))
#else
#define ACROSS static __attribute__((noinline))
#endif

/* `add_part` of more than half a tile's registers. */
ACROSS void NAMED(convoy_direct_wide)(Work *u, int64_t first_block, int64_t last_block, int64_t blocks);

#if !defined(UNIT) || UNIT == 1
ACROSS void NAMED(convoy_direct_wide)(Work *u, int64_t first_block, int64_t last_block, int64_t blocks) {
    if (u->channels > (VECTORS - 1) * LANES)
        add_part(VECTORS, u, first_block, last_block, blocks);
#if VECTORS == 4
    else
        add_part(3, u, first_block, last_block, blocks);
#endif
}
#endif

#if !defined(UNIT) || UNIT == 0
static void add_parts(Work *u, int64_t first_block, int64_t last_block, int64_t blocks) {
    switch (up(u->channels, LANES)) {
    case 1: add_part(1, u, first_block, last_block, blocks); break;
#if VECTORS == 4
    case 2: add_part(2, u, first_block, last_block, blocks); break;
#endif
    default: NAMED(convoy_direct_wide)(u, first_block, last_block, blocks);
    }
}

/* A band of an image's pixels by a group of tiles. */
NOT_INLINED void add_unit(const Sizes *z, void *const *tensors, int64_t unit) {
    const stored *x = tensors[0], *residual = tensors[3], *zeros = tensors[5];
    const float *weight = tensors[1], *bias = tensors[2];
    stored *y = tensors[4];
    float *workspace = tensors[6];
    int64_t pixels = z->p * z->q, blocks = up(pixels, PIXELS), registers = up(z->k, LANES);
    float *slot = workspace + THREAD_NUMBER() * z->slot_floats;
    int64_t group = unit % z->groups, band = unit / z->groups % z->bands, image = unit / z->groups / z->bands;
    int64_t first_block = blocks * band / z->bands, last_block = blocks * (band + 1) / z->bands;
    Work u = {.z = z, .image = x + image * z->h * z->w * z->c, .zeros = zeros, .held = slot};
    int64_t at = registers * group / z->groups, end = registers * (group + 1) / z->groups;
    for (int64_t next; at < end; at = next) {
        int64_t tile = at / VECTORS, first_k = at * LANES;
        next = least(end, (tile + 1) * VECTORS);
        u.channels = least((next - at) * LANES, z->k - first_k);
        u.weight = weight + tile * z->r * z->s * z->c * TILE + at % VECTORS * LANES;
        u.bias = bias + first_k;
        u.residual = residual ? residual + image * pixels * z->k + first_k : 0;
        u.y = y + image * pixels * z->k + first_k;
        for (u.first_r = 0; u.first_r < z->r; u.first_r = u.last_r) {
            u.last_r = least(z->r, u.first_r + z->part_r);
            for (u.first_c = 0; u.first_c < z->c; u.first_c = u.last_c) {
                u.last_c = least(z->c, u.first_c + z->part_c);
                u.begins = u.first_r == 0 && u.first_c == 0;
                u.ends = u.last_r == z->r && u.last_c == z->c;
                add_parts(&u, first_block, last_block, blocks);
            }
        }
    }
    int64_t begin = registers * group / z->groups * LANES, first = pixels * first_block / blocks;
    int64_t count = pixels * last_block / blocks - first, channels = least(end * LANES, z->k) - begin;
    stored *made = y + (image * pixels + first) * z->k + begin;
    if (channels == z->k) /* one run of values */
        smooth_stored_rows(made, 0, 1, count * channels, z->activation);
    else
        smooth_stored_rows(made, z->k, count, channels, z->activation);
}

/* The whole problem: x, weight, bias (padded to whole tiles), residual or NULL, y, as many zeros as a filter row has values, and
 * `threads` slots of `slot_floats` or NULL. */
void NAMED(convoy_direct)(const Sizes *z, void *const *tensors) {
    int64_t units = z->n * z->bands * z->groups;
    EACH_ITEM(unit, units, least(z->threads, units), add_unit(z, tensors, unit));
}
#endif
