/* LANES, the floats of a vector register, BF16, if values are stored so, and FUNCTION, the kernel's name, are given by the compiler's
 * flags; activated.h, tile_ops.h, blocks.h and epilogue.h stand before this.
 *
 * An implicit GEMM for forward convolutions in NHWC: operands in bf16, sums and epilogue in fp32.
 *
 * Rows are pixels of the result, columns output channels, and the reduction goes over [r][s][c], padded with zeros to whole steps of
 * 32. A panel is 32 rows of the left operand. They are gathered (and, from fp32, rounded) once for all output channels; or, where
 * the filter is 1x1 at stride 1, they are the input itself; or, for other filters at stride 1, they are pixels of a copy of the image
 * with its padding, at each tap other ones: rows beyond the right border then give sums that nobody wants.
 *
 * A block is a panel by some tiles of 16 channels, and its sums stay in registers. A unit is a band of panels, or of rows of the
 * result, by a group of tiles. It takes a block's weights through all panels before it goes on, so that they come from the second
 * cache or from memory once and then from the first.
 *
 * Weights: [group][tile of 16 channels][step][16 pairs of the reduction][16 channels][2]. The order of a sum depends on the problem
 * and on the instructions alone.
 */
#define PANEL 32 /* rows */

enum { AMX, AVX512 };
enum { GATHERED, IN_PLACE, PADDED };

typedef struct {
    int64_t n, c, h, w, k, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, groups, p, q;
    int64_t activation, residual;
    int64_t unit, channels, panels, bands, splits, threads, slot_bytes, panel_step;
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

static void gather_rows(const Sizes *z, bf16 *to, const stored *image, int64_t first, int64_t rows, int64_t channels) {
    int64_t p = first / z->q, q = first % z->q;
    for (int64_t i = 0; i < rows; i++) {
        gather_pixel(z, to + i * z->panel_step, image, p * z->stride_h - z->pad_h, q * z->stride_w - z->pad_w, channels);
        if (++q == z->q) q = 0, p++;
    }
}

/* Rows of the image that output rows from `first` to `last` see, with their padding: pixels a step apart, so that a panel at a tap is
 * 32 pixels one behind the other. */
static void copy_padded(const Sizes *z, bf16 *to, const stored *image, int64_t first, int64_t last, int64_t channels) {
    int64_t top = first - z->pad_h, bottom = last + (z->r - 1) * z->dilation_h - z->pad_h;
    for (int64_t row = top; row < bottom; row++)
        for (int64_t column = -z->pad_w; column < z->w + z->pad_w; column++, to += z->panel_step) {
            if (row < 0 || row >= z->h || column < 0 || column >= z->w)
                __builtin_memset(to, 0, channels * sizeof(bf16));
            else
                gather(to, image + (row * z->w + column) * z->c, channels);
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
    int64_t channels, outputs, steps, unit;
    int64_t origin, positions; /* the band's first pixel, and its rows of the left operand */
    int64_t line;              /* positions from one row of pixels to the next, or 0: no gaps between them */
} Work;

/* The left operand of a panel. */
static void set_rows(const Work *w, Block *u, int64_t first) {
    const Sizes *z = w->z;
    u->rows = least(PANEL, w->positions - first);
    u->a_step = z->panel_step, u->a = w->panels + first * z->panel_step;
    u->tap_steps = w->steps, u->taps = 1;
    if (z->panels == PADDED) {
        u->tap_steps = w->channels / STEP, u->taps = z->s;
        u->down = z->dilation_h * w->line * z->panel_step, u->across = z->dilation_w * z->panel_step;
    }
#ifdef BF16
    if (z->panels == IN_PLACE) {
        if (u->rows == PANEL)
            u->a_step = z->c, u->a = w->image + (w->origin + first) * z->c;
        else
            u->a = w->panels;
    }
#endif
}

/* The epilogue of a panel: of the runs of its rows that are pixels. */
static void finish_panel(const Work *w, int64_t first, int64_t rows, int64_t tile, int64_t tiles) {
    const Sizes *z = w->z;
    Epilogue e = {.bias = w->bias + tile * 16, .step = z->k, .activation = z->activation};
    e.channels = least(tiles * 16, w->outputs - tile * 16);
    for (int64_t i = 0; i < rows; i += e.rows) {
        int64_t column = w->line ? (first + i) % w->line : 0, pixel = first + i;
        e.rows = rows - i;
        if (w->line) {
            e.rows = least(e.rows, column < z->q ? z->q - column : w->line - column);
            if (column >= z->q) continue;
            pixel = (first + i) / w->line * z->q + column;
        }
        int64_t at = (w->origin + pixel) * z->k + tile * 16;
        e.residual = w->residual ? w->residual + at : 0, e.y = w->y + at;
        finish(e, w->sums + i * COLUMNS);
    }
}

/* The blocks of a band with tiles from `tile` on: some tiles by all panels, and then the next. */
static void add_band(Work *w, int64_t tile, int64_t last_tile) {
    int64_t panels = up(w->positions, PANEL);
    Block u = {.steps = w->steps, .b_step = w->steps * TILE_VALUES, .sums = w->sums};
    for (int64_t tiles; tile < last_tile; tile += tiles) {
        tiles = least(last_tile - tile, w->z->channels / 16);
        u.b = w->weight + tile * u.b_step, u.next = u.b + tiles * u.b_step;
        u.fetch = up(16 * least(tiles, last_tile - tile - tiles), panels);
        for (int64_t first = 0; first < w->positions; first += PANEL, u.next += u.steps * u.fetch * 32) {
            set_rows(w, &u, first);
            if (w->unit == AMX)
                amx_block(&u, tiles);
            else
                avx512_block(&u, tiles);
            finish_panel(w, first, u.rows, tile, tiles);
        }
    }
}

/* A band of panels, or of rows of pixels: their left operand, then the blocks. */
static void add_unit(Work *w, int64_t band, int64_t tile, int64_t last_tile) {
    const Sizes *z = w->z;
    if (z->panels == PADDED) {
        int64_t first = z->p * band / z->bands, last = z->p * (band + 1) / z->bands;
        w->line = z->w + 2 * z->pad_w, w->origin = first * z->q, w->positions = (last - first - 1) * w->line + z->q;
        copy_padded(z, w->panels, w->image, first, last, w->channels);
    } else {
        int64_t pixels = z->p * z->q, panels = up(pixels, PANEL), last = least(pixels, panels * (band + 1) / z->bands * PANEL);
        w->origin = panels * band / z->bands * PANEL, w->positions = last - w->origin;
        int64_t rest = w->positions % PANEL;
        if (z->panels == GATHERED)
            gather_rows(z, w->panels, w->image, w->origin, w->positions, w->channels);
        else if (rest)
            gather_rows(z, w->panels, w->image, last - rest, rest, w->channels);
    }
    add_band(w, tile, last_tile);
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
    int64_t channels = z->c / z->groups, outputs = z->k / z->groups, tiles = up(outputs, 16), each = z->channels / 16;
    int64_t steps = up(z->r * z->s * channels, STEP), units = z->n * z->groups * z->bands * z->splits, blocks = up(tiles, each);
    int64_t kind = z->unit == AMX && amx_permitted() ? AMX : AVX512;
    PARALLEL_FOR(unit, units, least(z->threads, units)) {
        int64_t split = unit % z->splits, band = unit / z->splits % z->bands;
        int64_t group = unit / z->splits / z->bands % z->groups, image = unit / z->splits / z->bands / z->groups;
        uint8_t *slot = workspace + THREAD_NUMBER() * z->slot_bytes;
        int64_t at = image * z->p * z->q * z->k + group * outputs;
        Work w = {.z = z, .channels = channels, .outputs = outputs, .steps = steps, .unit = kind};
        w.image = x + image * z->h * z->w * z->c + group * channels;
        w.residual = residual ? residual + at : 0, w.y = y + at;
        w.weight = weight + group * tiles * steps * TILE_VALUES, w.bias = bias + group * tiles * 16;
        w.sums = (float *)slot, w.panels = (bf16 *)(slot + PANEL * COLUMNS * 4);
        if (kind == AMX) tiles_begin();
        add_unit(&w, band, blocks * split / z->splits * each, least(tiles, blocks * (split + 1) / z->splits * each));
        if (kind == AMX) tiles_end();
    }
}
