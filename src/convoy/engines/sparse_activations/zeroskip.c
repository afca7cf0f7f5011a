/* LANES, the floats of a vector register, is given by the compiler's flags; ../cpu/activated.h stands before this.
 *
 * A forward convolution in NHWC, fp32, that multiplies by the input's non-zero values alone, with its epilogue and pooling.
 *
 * Work is cut into units: one image, a band of result rows, a group of output channel tiles. A unit counts the non-zero values
 * of the input rows that it reads. Where they are few it writes each pixel's channels as a list of (value, offset of the weight's
 * row), once for all taps and all output channels; then, tap by tap and block of channels by block, every pixel of the band
 * adds value * weight row over its list, with the sums of a tile in registers. Where they are many it multiplies densely, some
 * pixels at a time, from the same weights: the counting is all that a dense input pays.
 *
 * The sums of a band lie in the workspace until all taps are done; then come bias, residual, activation and pooling.
 *
 * Weights: [tile][tap][c][TILE], a tile's missing channels zero. The order of a sum is fixed by the problem and by which of the
 * two ways a band takes, so results repeat to the bit.
 */
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if LANES == 16
#define PIXELS 6 /* 24 sums, 4 weights and a value in 32 registers */
#else
#define PIXELS 2 /* 8 sums, 4 weights and a value in 16 registers */
#endif
#define VECTORS 4
#define TILE (VECTORS * LANES)
#define ROOM 16 /* a list may be written so many elements beyond its end */

typedef struct {
    int64_t n, c, h, w, k, r, s, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, p, q;
    int64_t pool, window_h, window_w, pool_stride_h, pool_stride_w, pool_pad_h, pool_pad_w, count_include_pad, y_h, y_w;
    int64_t activation, residual;
    int64_t band, tiles_a_unit, block_c, threads, slot_bytes, skip_under;
} Sizes;

enum { NO_POOL, MAX_POOL, AVERAGE_POOL };

typedef struct {
    int64_t first_row, rows;     /* of the convolution's output */
    int64_t first_input, inputs; /* rows of x that they read */
} Band;

static Band band_of(const Sizes *z, int64_t first, int64_t last) {
    Band b;
    if (z->pool == NO_POOL) {
        b.first_row = first;
        b.rows = last - first;
    } else {
        int64_t begin = most(0, first * z->pool_stride_h - z->pool_pad_h);
        int64_t end = least(z->p, (last - 1) * z->pool_stride_h - z->pool_pad_h + z->window_h);
        b.first_row = begin;
        b.rows = most(0, end - begin);
    }
    int64_t begin = most(0, b.first_row * z->stride_h - z->pad_h);
    int64_t end = least(z->h, (b.first_row + b.rows - 1) * z->stride_h - z->pad_h + (z->r - 1) * z->dilation_h + 1);
    b.first_input = begin;
    b.inputs = most(0, end - begin);
    return b;
}

static int64_t count_nonzero(const float *x, int64_t length) {
    int64_t total = 0;
    for (int64_t at = 0; at < length; at += 4096) {
        int32_t found = 0;
        int64_t end = least(length, at + 4096);
        for (int64_t i = at; i < end; i++) found += x[i] != 0.0f;
        total += found;
    }
    return total;
}

/* The non-zero values of some channels with the byte offsets of their weight rows; their number, rounded up to an even one by a
 * zero value at offset 0. NaN is not equal to zero, so it is kept. */
INLINE int32_t compress(const float *x, int64_t length, float *values, int32_t *offsets) {
    int32_t found = 0;
#ifdef __AVX512F__
    const __m512i step = _mm512_set1_epi32(16 * TILE * 4);
    __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                    _mm512_set1_epi32(TILE * 4));
    for (int64_t c = 0; c < length; c += 16) {
        __mmask16 inside = length - c >= 16 ? 0xffff : (__mmask16)((1u << (length - c)) - 1);
        __m512 v = _mm512_maskz_loadu_ps(inside, x + c);
        __mmask16 keep = _mm512_mask_cmp_ps_mask(inside, v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        _mm512_storeu_ps(values + found, _mm512_maskz_compress_ps(keep, v));
        _mm512_storeu_si512(offsets + found, _mm512_maskz_compress_epi32(keep, at));
        at = _mm512_add_epi32(at, step);
        found += __builtin_popcount(keep);
    }
#else
    for (int64_t c = 0; c < length; c++) {
        values[found] = x[c];
        offsets[found] = (int32_t)(c * TILE * 4);
        found += x[c] != 0.0f;
    }
#endif
    values[found] = 0.0f;
    offsets[found] = 0;
    return found + (found & 1);
}

/* sums += values over a list, times the weight rows: two at a time, so that additions do not wait for each other. */
INLINE void add_list(const int vectors, const float *values, const int32_t *offsets, int32_t count, const char *weight,
                     float *sums) {
    vec even[VECTORS], odd[VECTORS];
    for (int v = 0; v < vectors; v++) {
        even[v] = *(const vec *)(sums + v * LANES);
        odd[v] = all_lanes(0.0f);
    }
    for (int32_t i = 0; i < count; i += 2) {
        const vec *first = (const vec *)(weight + offsets[i]), *second = (const vec *)(weight + offsets[i + 1]);
        vec a = all_lanes(values[i]), b = all_lanes(values[i + 1]);
        for (int v = 0; v < vectors; v++) {
            even[v] += a * first[v];
            odd[v] += b * second[v];
        }
    }
    for (int v = 0; v < vectors; v++) *(vec *)(sums + v * LANES) = even[v] + odd[v];
}

/* sums of some pixels += all of some channels, times the weight rows. */
INLINE void add_dense(const int pixels, const int vectors, const float *x, int64_t pixel_step, int64_t channels,
                      const float *weight, float *sums) {
    vec held[PIXELS][VECTORS];
    for (int i = 0; i < pixels; i++)
        for (int v = 0; v < vectors; v++) held[i][v] = *(const vec *)(sums + i * TILE + v * LANES);
    for (int64_t c = 0; c < channels; c++) {
        vec row[VECTORS];
        for (int v = 0; v < vectors; v++) row[v] = *(const vec *)(weight + c * TILE + v * LANES);
        for (int i = 0; i < pixels; i++) {
            vec value = all_lanes(x[i * pixel_step + c]);
            for (int v = 0; v < vectors; v++) held[i][v] += value * row[v];
        }
    }
    for (int i = 0; i < pixels; i++)
        for (int v = 0; v < vectors; v++) *(vec *)(sums + i * TILE + v * LANES) = held[i][v];
}

INLINE void dense_row(const int vectors, const float *x, int64_t pixel_step, int64_t pixels, int64_t channels,
                      const float *weight, float *sums) {
    int64_t i = 0;
    for (; i + PIXELS <= pixels; i += PIXELS)
        add_dense(PIXELS, vectors, x + i * pixel_step, pixel_step, channels, weight, sums + i * TILE);
    x += i * pixel_step;
    sums += i * TILE;
    switch (pixels - i) {
#if PIXELS == 6
    case 5: add_dense(5, vectors, x, pixel_step, channels, weight, sums); break;
    case 4: add_dense(4, vectors, x, pixel_step, channels, weight, sums); break;
    case 3: add_dense(3, vectors, x, pixel_step, channels, weight, sums); break;
    case 2: add_dense(2, vectors, x, pixel_step, channels, weight, sums); break;
#endif
    case 1: add_dense(1, vectors, x, pixel_step, channels, weight, sums); break;
    }
}

typedef struct {
    const Sizes *z;
    Band band;
    const float *x;      /* the image */
    const float *weight; /* of one tile */
    float *sums;         /* [rows][q][TILE] */
    float *values;       /* [blocks][input rows][w][block_c + ROOM] */
    int32_t *offsets;
    int32_t *counts; /* [blocks][input rows][w] */
    int64_t blocks, skips;
} Unit;

/* One tap and block of channels, over all rows of the band. */
INLINE void add_block(const int vectors, const Unit *u, int64_t r, int64_t s, int64_t block) {
    const Sizes *z = u->z;
    int64_t first_c = block * z->block_c, channels = least(z->block_c, z->c - first_c);
    const float *weight = u->weight + ((r * z->s + s) * z->c + first_c) * TILE;
    int64_t shift = s * z->dilation_w - z->pad_w; /* the input column of output column 0 */
    int64_t begin = shift < 0 ? up(-shift, z->stride_w) : 0;
    int64_t end = shift >= z->w ? 0 : least(z->q, (z->w - 1 - shift) / z->stride_w + 1);
    if (begin >= end) return;
    int64_t first_w = begin * z->stride_w + shift, room = z->block_c + ROOM;
    for (int64_t row = 0; row < u->band.rows; row++) {
        int64_t line = (u->band.first_row + row) * z->stride_h - z->pad_h + r * z->dilation_h;
        if (line < 0 || line >= z->h) continue;
        float *sums = u->sums + (row * z->q + begin) * TILE;
        if (!u->skips) {
            const float *x = u->x + (line * z->w + first_w) * z->c + first_c;
            dense_row(vectors, x, z->stride_w * z->c, end - begin, channels, weight, sums);
            continue;
        }
        int64_t list = (block * u->band.inputs + line - u->band.first_input) * z->w + first_w;
        for (int64_t i = 0; i < end - begin; i++, list += z->stride_w)
            if (u->counts[list])
                add_list(vectors, u->values + list * room, u->offsets + list * room, u->counts[list], (const char *)weight,
                         sums + i * TILE);
    }
}

INLINE void add_tile(const int vectors, const Unit *u) {
    for (int64_t r = 0; r < u->z->r; r++)
        for (int64_t s = 0; s < u->z->s; s++)
            for (int64_t block = 0; block < u->blocks; block++) add_block(vectors, u, r, s, block);
}

static void make_lists(Unit *u) {
    const Sizes *z = u->z;
    int64_t room = z->block_c + ROOM, list = 0;
    for (int64_t block = 0; block < u->blocks; block++) {
        int64_t first_c = block * z->block_c, channels = least(z->block_c, z->c - first_c);
        const float *x = u->x + u->band.first_input * z->w * z->c + first_c;
        for (int64_t pixel = 0; pixel < u->band.inputs * z->w; pixel++, list++, x += z->c)
            u->counts[list] = compress(x, channels, u->values + list * room, u->offsets + list * room);
    }
}

/* ReLU as PyTorch has it: NaN stays NaN. */
INLINE float activated_one(float v, int64_t activation) {
    if (activation == NO_ACTIVATION) return v;
    v = v < 0.0f ? 0.0f : v;
    return activation == RELU6 && v > 6.0f ? 6.0f : v;
}

static void finish(const Sizes *z, const Unit *u, const float *residual, int64_t channels, int64_t first_k) {
    if (!z->residual && z->activation == NO_ACTIVATION) return;
    for (int64_t pixel = 0; pixel < u->band.rows * z->q; pixel++) {
        float *sums = u->sums + pixel * TILE;
        if (z->residual) {
            const float *add = residual + (u->band.first_row * z->q + pixel) * z->k + first_k;
            for (int64_t j = 0; j < channels; j++) sums[j] += add[j];
        }
        if (z->activation == RELU)
            for (int64_t j = 0; j < TILE; j++) sums[j] = activated_one(sums[j], RELU);
        else if (z->activation == RELU6)
            for (int64_t j = 0; j < TILE; j++) sums[j] = activated_one(sums[j], RELU6);
    }
}

/* One pooled pixel of a tile. A maximum takes NaN; the padding of an average counts where the pool says so. */
static void pool_pixel(const Sizes *z, const Unit *u, int64_t row, int64_t column, float *y, int64_t channels) {
    int64_t top = row * z->pool_stride_h - z->pool_pad_h, left = column * z->pool_stride_w - z->pool_pad_w;
    int64_t bottom = least(top + z->window_h, z->p + z->pool_pad_h), right = least(left + z->window_w, z->q + z->pool_pad_w);
    int64_t counted = (bottom - top) * (right - left);
    top = most(top, 0);
    left = most(left, 0);
    bottom = least(bottom, z->p);
    right = least(right, z->q);
    if (!z->count_include_pad) counted = (bottom - top) * (right - left);
    float pooled[TILE];
    for (int j = 0; j < TILE; j++) pooled[j] = z->pool == MAX_POOL ? -__builtin_inff() : 0.0f;
    for (int64_t i = top; i < bottom; i++)
        for (int64_t j = left; j < right; j++) {
            const float *seen = u->sums + ((i - u->band.first_row) * z->q + j) * TILE;
            if (z->pool == MAX_POOL)
                for (int k = 0; k < TILE; k++) pooled[k] = seen[k] > pooled[k] || seen[k] != seen[k] ? seen[k] : pooled[k];
            else
                for (int k = 0; k < TILE; k++) pooled[k] += seen[k];
        }
    if (z->pool == AVERAGE_POOL && counted > 0)
        for (int k = 0; k < TILE; k++) pooled[k] /= (float)counted;
    memcpy(y, pooled, channels * sizeof(float));
}

static void store(const Sizes *z, const Unit *u, int64_t first, int64_t last, float *y, int64_t first_k, int64_t channels) {
    for (int64_t row = first; row < last; row++)
        for (int64_t column = 0; column < z->y_w; column++) {
            float *to = y + (row * z->y_w + column) * z->k + first_k;
            if (z->pool == NO_POOL)
                memcpy(to, u->sums + ((row - first) * z->q + column) * TILE, channels * sizeof(float));
            else
                pool_pixel(z, u, row, column, to, channels);
        }
}

static void run_unit(Unit *u, const float *weight, const float *bias, const float *residual, float *y, int64_t first,
                     int64_t last, int64_t first_tile, int64_t last_tile) {
    const Sizes *z = u->z;
    u->band = band_of(z, first, last);
    int64_t size = u->band.inputs * z->w * z->c;
    int64_t found = count_nonzero(u->x + u->band.first_input * z->w * z->c, size);
    u->skips = found * 1000 < size * z->skip_under;
    if (u->skips) make_lists(u);
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
        int64_t first_k = tile * TILE, channels = least(TILE, z->k - first_k);
        u->weight = weight + tile * z->r * z->s * z->c * TILE;
        for (int64_t pixel = 0; pixel < u->band.rows * z->q; pixel++)
            memcpy(u->sums + pixel * TILE, bias + first_k, TILE * sizeof(float));
        if (channels > 2 * LANES)
            add_tile(VECTORS, u);
        else if (channels > LANES)
            add_tile(2, u);
        else
            add_tile(1, u);
        finish(z, u, residual, channels, first_k);
        store(z, u, first, last, y, first_k, channels);
    }
}

/* The whole problem: x, weight, bias (padded to whole tiles), residual or NULL, y, and `threads` slots. */
void convoy_zeroskip(const Sizes *z, void *const *tensors) {
    const float *x = tensors[0], *weight = tensors[1], *bias = tensors[2], *residual = tensors[3];
    float *y = tensors[4];
    char *workspace = tensors[5];
    int64_t bands = up(z->y_h, z->band), tiles = up(z->k, TILE), groups = up(tiles, z->tiles_a_unit);
    int64_t units = z->n * bands * groups;
    PARALLEL_FOR(unit, units, least(z->threads, units)) {
        char *slot = workspace + THREAD_NUMBER() * z->slot_bytes;
        int64_t group = unit % groups, band = unit / groups % bands, image = unit / groups / bands;
        int64_t first = band * z->band, last = least(first + z->band, z->y_h);
        int64_t blocks = up(z->c, z->block_c);
        int64_t rows = z->pool == NO_POOL ? z->band : least(z->p, (z->band - 1) * z->pool_stride_h + z->window_h);
        int64_t inputs = least(z->h, (rows - 1) * z->stride_h + (z->r - 1) * z->dilation_h + 1);
        int64_t lists = blocks * inputs * z->w;
        Unit u = {.z = z, .x = x + image * z->h * z->w * z->c, .blocks = blocks};
        u.sums = (float *)slot;
        u.values = u.sums + rows * z->q * TILE;
        u.offsets = (int32_t *)(u.values + lists * (z->block_c + ROOM));
        u.counts = u.offsets + lists * (z->block_c + ROOM);
        run_unit(&u, weight, bias, residual ? residual + image * z->p * z->q * z->k : 0,
                 y + image * z->y_h * z->y_w * z->k, first, last, group * z->tiles_a_unit,
                 least(tiles, (group + 1) * z->tiles_a_unit));
    }
}
