/* Bias, residual addition and activation of a block's sums, in fp32. activated.h, tile_ops.h and blocks.h stand before this. */
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
    int64_t smooth_later = is_smooth(u->activation), c;
    for (int64_t i = 0; i < u->rows; i++) {
        const stored *residual = u->residual ? u->residual + i * u->step : 0;
        float *row = sums + i * COLUMNS;
        for (c = 0; c < u->channels; c += LANES) {
            vec value = *(const vec *)(row + c) + *(const vec *)(u->bias + c);
            int64_t left = u->channels - c;
            if (residual) value += left >= LANES ? stored_lanes(residual + c) : first_stored_lanes(residual + c, left);
            *(vec *)(row + c) = smooth_later ? value : activated(value, u->activation);
        }
    }
    if (smooth_later) smooth_rows(sums, COLUMNS, u->rows, u->channels, u->activation);
    for (int64_t i = 0; i < u->rows; i++) {
        stored *y = u->y + i * u->step;
        const float *row = sums + i * COLUMNS;
        for (c = 0; c + LANES <= u->channels; c += LANES) put_stored_lanes(y + c, *(const vec *)(row + c));
        if (c < u->channels) put_first_stored_lanes(y + c, *(const vec *)(row + c), u->channels - c);
    }
}

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
