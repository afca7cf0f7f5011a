/* LANES, the floats of a vector register, BF16, if values are stored so, and FUNCTION, the kernel's name, are given by the compiler's
 * flags; activated.h, tile_ops.h and blocks.h stand before this.
 *
 * An implicit GEMM for forward convolutions in NHWC: operands in bf16, sums and epilogue in fp32.
 *
 * Rows are pixels of the result, columns output channels, and the reduction goes over [r][s][c], padded with zeros to whole steps of
 * 32. A panel is 32 rows of the left operand, gathered (and, from fp32, rounded) once for all output channels; where the filter is
 * 1x1 at stride 1, a panel may be the input itself. A block is a panel by some tiles of 16 channels, and its sums stay in registers.
 *
 * A unit is a band of panels by a group of tiles. It takes a block's weights through all panels before it goes on, so that they
 * come from the second cache or from memory once and then from the first.
 *
 * Weights: [group][tile of 16 channels][step][16 pairs of the reduction][16 channels][2]. The order of a sum depends on the problem
 * and on the instructions alone.
 */
#define PANEL 32 /* rows */

enum { AMX, AVX512 };

typedef struct {
    int64_t n, c, h, w, k, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, groups, p, q;
    int64_t activation, residual;
    int64_t unit, channels, in_place, bands, splits, threads, slot_bytes, panel_step;
} Sizes;

/* A run of values as bf16. */
INLINE void gather(bf16 *to, const stored *from, int64_t count) {
#ifdef BF16
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) __builtin_memcpy(to + i, from + i, 64);
    if (count & 16) __builtin_memcpy(to + i, from + i, 32), i += 16;
    if (count & 8) __builtin_memcpy(to + i, from + i, 16), i += 8;
    if (count & 4) __builtin_memcpy(to + i, from + i, 8), i += 4;
    if (count & 2) __builtin_memcpy(to + i, from + i, 4), i += 2;
    if (count & 1) to[i] = from[i];
#else
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) *(halves *)(to + i) = narrowed(*(const vec *)(from + i));
    for (; i < count; i++) to[i] = narrowed(all_lanes(from[i]))[0];
#endif
}

/* The values that one pixel's sums are made of, from row and column (top, left) of a group's channels on. */
INLINE void gather_pixel(const Sizes *z, bf16 *to, const stored *image, int64_t top, int64_t left, int64_t channels) {
    bf16 *end = to + z->panel_step - STEP; /* a row's last step only keeps rows apart */
    int64_t run = z->s * channels, within = left >= 0 && left + z->s <= z->w && z->dilation_w == 1 && z->groups == 1;
    for (int64_t r = 0; r < z->r; r++, to += run) {
        int64_t row = top + r * z->dilation_h;
        const stored *from = image + (row * z->w + left) * z->c;
        if (row < 0 || row >= z->h)
            __builtin_memset(to, 0, run * sizeof(bf16));
        else if (within)
            gather(to, from, run);
        else
            for (int64_t s = 0; s < z->s; s++) {
                int64_t column = left + s * z->dilation_w;
                if (column < 0 || column >= z->w)
                    __builtin_memset(to + s * channels, 0, channels * sizeof(bf16));
                else
                    gather(to + s * channels, from + s * z->dilation_w * z->c, channels);
            }
    }
    if (to < end) __builtin_memset(to, 0, (end - to) * sizeof(bf16));
}

static void gather_panel(const Sizes *z, bf16 *panel, const stored *image, int64_t first, int64_t rows, int64_t channels) {
    int64_t p = first / z->q, q = first % z->q;
    for (int64_t i = 0; i < rows; i++) {
        gather_pixel(z, panel + i * z->panel_step, image, p * z->stride_h - z->pad_h, q * z->stride_w - z->pad_w, channels);
        if (++q == z->q) q = 0, p++;
    }
}

typedef struct {
    const float *bias;
    const stored *residual; /* of the first row and channel, or NULL */
    stored *y;
    int64_t step, rows, channels, activation;
} Epilogue;

#ifdef BF16
#define VALUES_LOADED bf16_loaded
#define VALUES_STORED bf16_stored
#else
#define VALUES_LOADED sums_loaded
#define VALUES_STORED sums_stored
#endif

/* Bias, residual, activation: of whole tiles of a block's sums. */
INLINE FOR_AVX512 void finish_tiles(const int tiles, const int residual, const int activation, const Epilogue *u, const float *sums) {
    sums16 bias[2];
    for (int j = 0; j < tiles; j++) bias[j] = sums_loaded(u->bias + j * 16);
    for (int64_t i = 0; i < u->rows; i++, sums += COLUMNS)
        for (int j = 0; j < tiles; j++) {
            sums16 value = sums_loaded(sums + j * 16) + bias[j];
            if (residual) value += VALUES_LOADED(u->residual + i * u->step + j * 16);
            if (activation != NO_ACTIVATION) value = not_below(value, 0.0f);
            if (activation == RELU6) value = not_above(value, 6.0f);
            VALUES_STORED(u->y + i * u->step + j * 16, value);
        }
}

#define FINISH(tiles, residual)                                                          \
    switch (u->activation) {                                                             \
    case NO_ACTIVATION: finish_tiles(tiles, residual, NO_ACTIVATION, u, sums); break;    \
    case RELU: finish_tiles(tiles, residual, RELU, u, sums); break;                      \
    case RELU6: finish_tiles(tiles, residual, RELU6, u, sums); break;                    \
    }

static FOR_AVX512 void finish_two(const Epilogue *u, const float *sums) {
    if (u->residual)
        FINISH(2, 1)
    else
        FINISH(2, 0)
}

static FOR_AVX512 void finish_one(const Epilogue *u, const float *sums) {
    if (u->residual)
        FINISH(1, 1)
    else
        FINISH(1, 0)
}

/* The same of any number of channels, with any activation. */
static void finish_rest(const Epilogue *u, float *sums) {
    for (int64_t i = 0; i < u->rows; i++, sums += COLUMNS) {
        const stored *residual = u->residual ? u->residual + i * u->step : 0;
        stored *y = u->y + i * u->step;
        int64_t c = 0, smooth_later = is_smooth(u->activation);
        for (; c < u->channels; c += LANES) {
            vec value = *(const vec *)(sums + c) + *(const vec *)(u->bias + c);
            int64_t left = u->channels - c;
            if (residual) value += left >= LANES ? stored_lanes(residual + c) : first_stored_lanes(residual + c, left);
            if (smooth_later)
                *(vec *)(sums + c) = value;
            else if (left >= LANES)
                put_stored_lanes(y + c, activated(value, u->activation));
            else
                put_first_stored_lanes(y + c, activated(value, u->activation), left);
        }
        if (!smooth_later) continue;
        smooth_rows(sums, COLUMNS, 1, u->channels, u->activation);
        for (c = 0; c + LANES <= u->channels; c += LANES) put_stored_lanes(y + c, *(const vec *)(sums + c));
        if (c < u->channels) put_first_stored_lanes(y + c, *(const vec *)(sums + c), u->channels - c);
    }
}

typedef struct {
    const Sizes *z;
    const stored *image, *residual; /* of one image and group, as y */
    stored *y;
    const bf16 *weight; /* of one group, as bias */
    const float *bias;
    bf16 *panels;
    float *sums;
    int64_t channels, outputs, steps, pixels;
    int64_t band, following; /* panels of the band, and tiles that follow in the unit */
} Work;

/* The same: of a block. */
static void finish(Epilogue u, float *sums) {
    for (int64_t left; u.channels >= 16 && !is_smooth(u.activation); u.channels = left) {
        int64_t done = u.channels >= 32 ? 32 : 16;
        left = u.channels - done;
        if (done == 32)
            finish_two(&u, sums);
        else
            finish_one(&u, sums);
        u.bias += done, u.y += done, sums += done;
        if (u.residual) u.residual += done;
    }
    if (u.channels) finish_rest(&u, sums);
}

/* The block of a panel's rows with some tiles. */
static void add_block(const Work *w, int64_t panel, int64_t in_band, int64_t tile, int64_t tiles, int64_t unit) {
    const Sizes *z = w->z;
    int64_t first = panel * PANEL;
    Block u = {.rows = least(PANEL, w->pixels - first), .steps = w->steps, .b_step = w->steps * TILE_VALUES, .sums = w->sums};
    u.b = w->weight + tile * u.b_step;
    u.a_step = z->panel_step, u.a = w->panels + (z->in_place ? 0 : in_band) * PANEL * z->panel_step;
    u.fetch = up(16 * least(tiles, w->following), w->band);
    u.next = u.b + tiles * u.b_step + in_band * u.steps * u.fetch * 32;
#ifdef BF16
    if (z->in_place && u.rows == PANEL) u.a_step = z->c, u.a = w->image + first * z->c;
#endif
    if (unit == AMX)
        amx_block(&u, tiles);
    else
        avx512_block(&u, tiles);
    int64_t at = first * z->k + tile * 16;
    Epilogue e = {.bias = w->bias + tile * 16, .residual = w->residual ? w->residual + at : 0, .y = w->y + at, .step = z->k};
    e.rows = u.rows, e.channels = least(tiles * 16, w->outputs - tile * 16), e.activation = z->activation;
    finish(e, w->sums);
}

static void add_unit(Work *w, int64_t first_panel, int64_t last_panel, int64_t tile, int64_t last_tile, int64_t unit) {
    const Sizes *z = w->z;
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        int64_t rows = least(PANEL, w->pixels - panel * PANEL);
        if (z->in_place && rows == PANEL) continue;
        bf16 *to = w->panels + (z->in_place ? 0 : panel - first_panel) * PANEL * z->panel_step;
        gather_panel(z, to, w->image, panel * PANEL, rows, w->channels);
    }
    w->band = last_panel - first_panel;
    for (int64_t tiles; tile < last_tile; tile += tiles) {
        tiles = least(last_tile - tile, z->channels / 16);
        w->following = last_tile - tile - tiles;
        for (int64_t panel = first_panel; panel < last_panel; panel++)
            add_block(w, panel, panel - first_panel, tile, tiles, unit);
    }
}

static FOR_AMX void tiles_begin(void) { TILES_BEGIN(); }
static FOR_AMX void tiles_end(void) { TILES_END(); }

/* The whole problem: x, weight, bias (of whole tiles), residual or NULL, y, and `threads` slots of `slot_bytes`. */
void FUNCTION(const Sizes *z, void *const *tensors) {
    const stored *x = tensors[0], *residual = tensors[3];
    const bf16 *weight = tensors[1];
    const float *bias = tensors[2];
    stored *y = tensors[4];
    uint8_t *workspace = tensors[5];
    int64_t channels = z->c / z->groups, outputs = z->k / z->groups, pixels = z->p * z->q, panels = up(pixels, PANEL);
    int64_t tiles = up(outputs, 16), steps = up(z->r * z->s * channels, STEP), units = z->n * z->groups * z->bands * z->splits;
    int64_t unit_kind = z->unit == AMX && amx_permitted() ? AMX : AVX512;
    PARALLEL_FOR(static, unit, units, least(z->threads, units)) {
        int64_t split = unit % z->splits, band = unit / z->splits % z->bands;
        int64_t group = unit / z->splits / z->bands % z->groups, image = unit / z->splits / z->bands / z->groups;
        uint8_t *slot = workspace + THREAD_NUMBER() * z->slot_bytes;
        int64_t at = image * pixels * z->k + group * outputs;
        Work w = {.z = z, .channels = channels, .outputs = outputs, .steps = steps, .pixels = pixels};
        w.image = x + image * z->h * z->w * z->c + group * channels;
        w.residual = residual ? residual + at : 0, w.y = y + at;
        w.weight = weight + group * tiles * steps * TILE_VALUES, w.bias = bias + group * tiles * 16;
        w.sums = (float *)slot, w.panels = (bf16 *)(slot + PANEL * COLUMNS * 4);
        int64_t blocks = up(tiles, z->channels / 16), each = z->channels / 16;
        if (unit_kind == AMX) tiles_begin();
        add_unit(&w, panels * band / z->bands, panels * (band + 1) / z->bands, blocks * split / z->splits * each,
                 least(tiles, blocks * (split + 1) / z->splits * each), unit_kind);
        if (unit_kind == AMX) tiles_end();
    }
}
