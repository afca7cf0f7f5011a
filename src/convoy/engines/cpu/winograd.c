/* LANES, the floats of a vector register, VECTORS, the registers of a row of weights, and PIXELS, the rows of a product's block, are
 * given by the compiler's flags; activated.h stands before this.
 *
 * Winograd's F(m x m, 3x3) at stride 1 in NHWC, fp32, with bias, residual and activation: m = 2 or 4.
 *
 * A unit is a band of tiles, over all images, by a group of output channels. It transforms its tiles' inputs once; then, for some
 * channels at a time, come one product for each of the (m + 2)^2 positions, whose sums stay in registers while input channels go by,
 * and the transform of what they make, with the epilogue. While one position's weights are in use those of the next are fetched.
 *
 * Weights: [tile of channels][position][c][TILE], missing channels zero. The order of a sum depends on the problem alone.
 */
#define TILE (VECTORS * LANES)
#define LINE 16 /* floats of a line of the cache */
#define MOST_M 4
#define MOST_SIDE (MOST_M + 2)

typedef struct {
    int64_t n, c, h, w, k, pad_h, pad_w, p, q;
    int64_t activation, residual;
    int64_t m, rows, columns, bands, groups, row_floats, threads, slot_floats;
} Sizes;

typedef struct {
    const Sizes *z;
    const float *x, *weight, *bias, *residual; /* weight, bias, residual and y: of these channels */
    float *y, *inputs, *products;              /* inputs: [position][tile][row_floats]; products: [position][tile][TILE] */
    int64_t first, count, channels;            /* the tiles; the channels of a row of weights that are done here */
} Band;

typedef struct {
    int64_t image, top, left; /* of a tile's result */
} Place;

INLINE Place placed(const Sizes *z, int64_t tile, const int m) {
    int64_t row = tile / z->columns;
    return (Place){row / z->rows, row % z->rows * m, tile % z->columns * m};
}

/* B^T d along one side: m + 2 values, in place. */
INLINE void read_side(vec *d, const int step, const int m) {
    vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step];
    if (m == 2) {
        d[0] = d0 - d2, d[step] = d1 + d2, d[2 * step] = d2 - d1, d[3 * step] = d1 - d3;
        return;
    }
    vec d4 = d[4 * step], d5 = d[5 * step];
    vec even = d4 - 4.0f * d2, odd = d3 - 4.0f * d1;
    vec even2 = d4 - d2, odd2 = 2.0f * (d3 - d1);
    d[0] = 4.0f * (d0 - d2) + even2;
    d[step] = even + odd, d[2 * step] = even - odd;
    d[3 * step] = even2 + odd2, d[4 * step] = even2 - odd2;
    d[5 * step] = 4.0f * (d1 - d3) + (d5 - d3);
}

/* A^T t along one side: m values from m + 2, in place. */
INLINE void write_side(vec *t, const int step, const int m) {
    vec t0 = t[0], t1 = t[step], t2 = t[2 * step], t3 = t[3 * step];
    if (m == 2) {
        t[0] = t0 + t1 + t2, t[step] = t1 - t2 - t3;
        return;
    }
    vec t4 = t[4 * step], t5 = t[5 * step];
    vec sum = t1 + t2, difference = t1 - t2, sum2 = t3 + t4, difference2 = t3 - t4;
    t[0] = t0 + sum + sum2;
    t[step] = difference + 2.0f * difference2;
    t[2 * step] = sum + 4.0f * sum2;
    t[3 * step] = difference + 8.0f * difference2 + t5;
}

/* Some registers of channels of one tile's input, whose rows and columns are so many floats apart. */
INLINE void read_tile(const float *x, int64_t row, int64_t column, float *to, int64_t step, int64_t channels, const int m) {
    const int side = m + 2;
    for (int64_t c = 0; c < channels; c += LANES, x += LANES, to += LANES) {
        vec d[MOST_SIDE * MOST_SIDE];
        UNROLLED for (int j = 0; j < side; j++) {
            const float *from = x + j * column;
            UNROLLED for (int i = 0; i < side; i++, from += row) d[i * side + j] = *(const vec *)from;
            read_side(d + j, side, m);
        }
        float *put = to;
        UNROLLED for (int i = 0; i < side; i++) {
            read_side(d + i * side, 1, m);
            UNROLLED for (int j = 0; j < side; j++, put += step) *(vec *)put = d[i * side + j];
        }
    }
}

/* A register of channels of one tile's input, with zeros for the pixels outside the image and the channels that are not there. Tiles
 * at the borders are few, so that this is neither unrolled nor compiled for each m. */
static __attribute__((noinline)) void pad_tile(const Band *u, Place at, int64_t c, int64_t side, vec *to) {
    const Sizes *z = u->z;
    int64_t top = at.top - z->pad_h, left = at.left - z->pad_w, lanes = least(LANES, z->c - c);
    const float *x = u->x + at.image * z->h * z->w * z->c + c;
    for (int64_t row = top; row < top + side; row++)
        for (int64_t column = left; column < left + side; column++, to++) {
            const float *from = x + (row * z->w + column) * z->c;
            if (row < 0 || row >= z->h || column < 0 || column >= z->w)
                *to = all_lanes(0.0f);
            else
                *to = lanes == LANES ? *(const vec *)from : first_lanes(from, lanes);
        }
}

INLINE void read_tiles(const Band *u, const int m) {
    const Sizes *z = u->z;
    const int side = m + 2;
    for (int64_t tile = 0; tile < u->count; tile++) {
        Place at = placed(z, u->first + tile, m);
        int64_t top = at.top - z->pad_h, left = at.left - z->pad_w, c = 0, step = u->count * z->row_floats;
        float *to = u->inputs + tile * z->row_floats;
        vec padded[MOST_SIDE * MOST_SIDE];
        int64_t inside = top >= 0 && top + side <= z->h && left >= 0 && left + side <= z->w, count;
        for (; c < z->c; c += count) { /* all whole registers at once where the tile lies within the image */
            const float *x = (const float *)padded;
            int64_t row = side * LANES, column = LANES;
            count = inside && c + LANES <= z->c ? z->c / LANES * LANES : LANES;
            if (inside && c + LANES <= z->c)
                x = u->x + ((at.image * z->h + top) * z->w + left) * z->c, row = z->w * z->c, column = z->c;
            else
                pad_tile(u, at, c, side, padded);
            read_tile(x, row, column, to + c, step, count, m);
        }
    }
}

/* Some tiles at one position, from number `first` of the band on. */
INLINE void multiply(const int tiles, const int vectors, const Band *u, int64_t position, int64_t first, const float *weight,
                     const char *ahead, int64_t step) {
    const Sizes *z = u->z;
    const float *x = u->inputs + (position * u->count + first) * z->row_floats;
    vec sums[PIXELS][VECTORS];
    UNROLLED for (int i = 0; i < tiles; i++)
        UNROLLED for (int v = 0; v < vectors; v++) sums[i][v] = all_lanes(0.0f);
    for (int64_t c = 0; c < z->c; c++, weight += TILE, ahead += step) {
        vec row[VECTORS];
        for (int64_t line = 0; line < step; line += LINE * sizeof(float)) __builtin_prefetch(ahead + line, 0, 2);
        UNROLLED for (int v = 0; v < vectors; v++) row[v] = *(const vec *)(weight + v * LANES);
        UNROLLED for (int i = 0; i < tiles; i++) {
            vec value = all_lanes(x[i * z->row_floats + c]);
            UNROLLED for (int v = 0; v < vectors; v++) sums[i][v] += value * row[v];
        }
    }
    float *to = u->products + (position * u->count + first) * TILE;
    UNROLLED for (int i = 0; i < tiles; i++, to += TILE)
        UNROLLED for (int v = 0; v < vectors; v++) *(vec *)(to + v * LANES) = sums[i][v];
}

/* All tiles of the band at all positions: blocks share them out evenly, and the next position's weights, which they fetch. */
INLINE void multiply_all(const int vectors, const Band *u, int64_t positions) {
    int64_t blocks = up(u->count, PIXELS), floats = u->z->c * TILE, step = TILE * sizeof(float) / blocks;
    for (int64_t position = 0; position < positions; position++) {
        const float *weight = u->weight + position * floats;
        for (int64_t block = 0; block < blocks; block++) {
            int64_t first = u->count * block / blocks, last = u->count * (block + 1) / blocks;
            const char *ahead = (const char *)(weight + floats) + block * floats * sizeof(float) / blocks;
            switch (last - first) {
            case 1: multiply(1, vectors, u, position, first, weight, ahead, step); break;
            case 2: multiply(2, vectors, u, position, first, weight, ahead, step); break;
            case 3: multiply(3, vectors, u, position, first, weight, ahead, step); break;
            case 4: multiply(4, vectors, u, position, first, weight, ahead, step); break;
            case 5: multiply(5, vectors, u, position, first, weight, ahead, step); break;
            case 6: multiply(6, vectors, u, position, first, weight, ahead, step); break;
            }
        }
    }
}

/* Where a tile's results go. */
typedef struct {
    int64_t origin, rows, columns; /* of y; those that lie within the image */
} Target;

/* The epilogue of a register of channels that is not full, or of a tile that is not whole. */
static __attribute__((noinline)) void finish_some(const Band *u, const Target *at, int64_t c, int64_t m, const vec *values) {
    const Sizes *z = u->z;
    int64_t lanes = least(LANES, u->channels - c);
    for (int64_t i = 0; i < at->rows; i++)
        for (int64_t j = 0; j < at->columns; j++) {
            int64_t to = at->origin + (i * z->q + j) * z->k + c;
            vec value = values[i * m + j];
            if (z->residual) value += lanes == LANES ? *(const vec *)(u->residual + to) : first_lanes(u->residual + to, lanes);
            value = activated(value, z->activation);
            if (lanes == LANES)
                *(vec *)(u->y + to) = value;
            else
                put_first_lanes(u->y + to, value, lanes);
        }
}

/* The result of one tile, the parts of it that lie within the image. */
INLINE void write_tile(const Band *u, int64_t tile, const int m) {
    const int side = m + 2;
    const Sizes *z = u->z;
    Place place = placed(z, u->first + tile, m);
    Target at = {((place.image * z->p + place.top) * z->q + place.left) * z->k, least(m, z->p - place.top), least(m, z->q - place.left)};
    for (int64_t c = 0; c < u->channels; c += LANES) {
        const float *from = u->products + tile * TILE + c;
        vec t[MOST_SIDE * MOST_SIDE], y[MOST_M * MOST_M], bias = *(const vec *)(u->bias + c);
        UNROLLED for (int i = 0; i < side; i++) {
            UNROLLED for (int j = 0; j < side; j++, from += u->count * TILE) t[i * side + j] = *(const vec *)from;
            write_side(t + i * side, 1, m);
        }
        UNROLLED for (int j = 0; j < m; j++) {
            write_side(t + j, side, m);
            UNROLLED for (int i = 0; i < m; i++) y[i * m + j] = t[i * side + j] + bias;
        }
        if (at.rows < m || at.columns < m || u->channels - c < LANES) {
            vec held[MOST_M * MOST_M];
            UNROLLED for (int i = 0; i < m * m; i++) held[i] = y[i];
            finish_some(u, &at, c, m, held);
            continue;
        }
        float *to = u->y + at.origin + c;
        if (z->residual) {
            const float *residual = u->residual + at.origin + c;
            UNROLLED for (int i = 0; i < m * m; i++) y[i] += *(const vec *)(residual + (i / m * z->q + i % m) * z->k);
        }
        activate(y, m * m, z->activation);
        UNROLLED for (int i = 0; i < m * m; i++) *(vec *)(to + (i / m * z->q + i % m) * z->k) = y[i];
    }
    if (is_smooth(z->activation))
        for (int64_t i = 0; i < at.rows; i++)
            smooth_rows(u->y + at.origin + i * z->q * z->k, z->k, at.columns, u->channels, z->activation);
}

static void read_all(const Band *u) {
    if (u->z->m == 2)
        read_tiles(u, 2);
    else
        read_tiles(u, 4);
}

static void write_all(const Band *u) {
    for (int64_t tile = 0; tile < u->count; tile++)
        if (u->z->m == 2)
            write_tile(u, tile, 2);
        else
            write_tile(u, tile, 4);
}

static void add_channels(const Band *u) {
    int64_t positions = (u->z->m + 2) * (u->z->m + 2);
    switch (up(u->channels, LANES)) {
    case 1: multiply_all(1, u, positions); break;
    case 2: multiply_all(2, u, positions); break;
#if VECTORS == 4
    case 3: multiply_all(3, u, positions); break;
    case 4: multiply_all(4, u, positions); break;
#endif
    }
    write_all(u);
}

/* The whole problem: x, weight, bias (padded to whole tiles of channels), residual or NULL, y, and `threads` slots of `slot_floats`. */
void convoy_winograd(const Sizes *z, void *const *tensors) {
    const float *x = tensors[0], *weight = tensors[1], *bias = tensors[2], *residual = tensors[3];
    float *y = tensors[4], *workspace = tensors[5];
    int64_t tiles = z->n * z->rows * z->columns, blocks = up(tiles, PIXELS);
    int64_t registers = up(z->k, LANES), units = z->groups * z->bands;
    int64_t positions = (z->m + 2) * (z->m + 2);
    PARALLEL_FOR(unit, units, least(z->threads, units)) {
        float *slot = workspace + THREAD_NUMBER() * z->slot_floats;
        int64_t group = unit / z->bands, band = unit % z->bands;
        int64_t first = tiles * (blocks * band / z->bands) / blocks, last = tiles * (blocks * (band + 1) / z->bands) / blocks;
        Band u = {.z = z, .x = x, .inputs = slot, .first = first, .count = last - first};
        u.products = slot + positions * u.count * z->row_floats;
        read_all(&u);
        int64_t at = registers * group / z->groups, end = registers * (group + 1) / z->groups;
        for (int64_t next; at < end; at = next) {
            int64_t row = at / VECTORS, first_k = at * LANES;
            next = least(end, (row + 1) * VECTORS);
            u.channels = least((next - at) * LANES, z->k - first_k);
            u.weight = weight + row * positions * z->c * TILE + at % VECTORS * LANES;
            u.bias = bias + first_k;
            u.residual = residual ? residual + first_k : 0;
            u.y = y + first_k;
            add_channels(&u);
        }
    }
}
