/* Blocks of sums: some rows of the left operand by some tiles of 16 output channels, with AMX's tiles or with vectors. tile_ops.h stands
 * before this.
 *
 * Rows lie `a_step` values apart, in steps of 32 values of the reduction. A tile's weights are [step][16 pairs][16 channels][2]. */
#define STEP 32         /* values of the reduction in a step */
#define COLUMNS 64      /* floats of a row of sums: the most channels of a block */
#define TILE_VALUES 512 /* of a step of a tile's weights */
#define VECTOR_SUMS 24

typedef struct {
    const bf16 *a, *b;
    int64_t a_step, b_step;  /* values from row to row, and from tile to tile */
    int64_t rows, steps;     /* steps: of the whole reduction */
    int64_t tap_steps, taps; /* steps of one filter tap, and taps of a filter row; of one tap: all steps */
    int64_t down, across;    /* values from a filter row's left operand to the next one's, and from a tap's */
    const bf16 *next;        /* weights that are used soon; so many lines of them are fetched in each step */
    int64_t fetch;
    float *sums; /* [rows][COLUMNS] */
} Block;

/* Lines of the next block's weights, so that they come from memory while this block is computed. */
#define FETCH(from)                                                                           \
    for (int64_t line = 0; line < u->fetch; line++) __builtin_prefetch((from) + line * 32, 0, 2); \
    (from) += u->fetch * 32

/* The left operand of the next step: of the same tap, or of the next. */
typedef struct {
    const bf16 *a, *row;
    int64_t step, tap;
} Taps;

INLINE void next_step(const Block *u, Taps *t) {
    t->a += STEP;
    if (++t->step < u->tap_steps) return;
    t->step = 0;
    if (++t->tap == u->taps) t->tap = 0, t->row += u->down;
    t->a = t->row + t->tap * u->across;
}

/* Up to two tiles of rows by two of channels. */
INLINE FOR_AMX void tiles_2x2(const int m, const int n, const Block *u) {
    const bf16 *b = u->b, *next = u->next;
    Taps t = {u->a, u->a, 0, 0};
    int64_t a_bytes = u->a_step * 2;
    TILE_ZERO(0);
    if (n > 1) TILE_ZERO(1);
    if (m > 1) TILE_ZERO(2);
    if (m > 1 && n > 1) TILE_ZERO(3);
    for (int64_t step = 0; step < u->steps; step++, next_step(u, &t), b += TILE_VALUES) {
        TILE_LOAD(4, t.a, a_bytes);
        TILE_LOAD(6, b, 64);
        TILE_DP(0, 4, 6);
        FETCH(next);
        if (n > 1) {
            TILE_LOAD(7, b + u->b_step, 64);
            TILE_DP(1, 4, 7);
        }
        if (m > 1) {
            TILE_LOAD(5, t.a + 16 * u->a_step, a_bytes);
            TILE_DP(2, 5, 6);
            if (n > 1) TILE_DP(3, 5, 7);
        }
    }
    TILE_STORE(0, u->sums, COLUMNS * 4);
    if (n > 1) TILE_STORE(1, u->sums + 16, COLUMNS * 4);
    if (m > 1) TILE_STORE(2, u->sums + 16 * COLUMNS, COLUMNS * 4);
    if (m > 1 && n > 1) TILE_STORE(3, u->sums + 16 * COLUMNS + 16, COLUMNS * 4);
}

/* One tile of rows by up to four of channels. */
INLINE FOR_AMX void tiles_1x4(const int n, const Block *u) {
    const bf16 *b = u->b, *next = u->next;
    Taps t = {u->a, u->a, 0, 0};
    TILE_ZERO(0);
    if (n > 1) TILE_ZERO(1);
    if (n > 2) TILE_ZERO(2);
    if (n > 3) TILE_ZERO(3);
    for (int64_t step = 0; step < u->steps; step++, next_step(u, &t), b += TILE_VALUES) {
        TILE_LOAD(4, t.a, u->a_step * 2);
        TILE_LOAD(5, b, 64);
        TILE_DP(0, 4, 5);
        FETCH(next);
        if (n > 1) {
            TILE_LOAD(6, b + u->b_step, 64);
            TILE_DP(1, 4, 6);
        }
        if (n > 2) {
            TILE_LOAD(7, b + 2 * u->b_step, 64);
            TILE_DP(2, 4, 7);
        }
        if (n > 3) {
            TILE_LOAD(5, b + 3 * u->b_step, 64);
            TILE_DP(3, 4, 5);
        }
    }
    TILE_STORE(0, u->sums, COLUMNS * 4);
    if (n > 1) TILE_STORE(1, u->sums + 16, COLUMNS * 4);
    if (n > 2) TILE_STORE(2, u->sums + 32, COLUMNS * 4);
    if (n > 3) TILE_STORE(3, u->sums + 48, COLUMNS * 4);
}

/* A block whose rows are a panel's by `tiles` tiles, of four at most. */
static FOR_AMX void amx_block(const Block *u, int64_t tiles) {
    TILES_FENCE();
    if (tiles <= 2 && u->rows > 16) {
        if (tiles == 1)
            tiles_2x2(2, 1, u);
        else
            tiles_2x2(2, 2, u);
        TILES_FENCE();
        return;
    }
    for (int64_t row = 0; row < u->rows; row += 16) {
        Block part = *u;
        part.a += row * u->a_step, part.sums += row * COLUMNS, part.fetch = row ? 0 : u->fetch;
        switch (tiles) {
        case 1: tiles_2x2(1, 1, &part); break;
        case 2: tiles_2x2(1, 2, &part); break;
        case 3: tiles_1x4(3, &part); break;
        case 4: tiles_1x4(4, &part); break;
        }
    }
    TILES_FENCE();
}

INLINE FOR_AVX512 void vectors(const int rows, const int tiles, const Block *u, int64_t first) {
    sums16 sums[VECTOR_SUMS];
    const bf16 *b = u->b, *next = u->next;
    Taps t = {u->a + first * u->a_step, u->a + first * u->a_step, 0, 0};
    for (int i = 0; i < rows * tiles; i++) sums[i] = no_sums();
    for (int64_t step = 0; step < u->steps; step++, next_step(u, &t)) {
        const bf16 *a = t.a;
        FETCH(next);
        for (int pair = 0; pair < 16; pair++, a += 2, b += 32)
            for (int j = 0; j < tiles; j++)
                for (int i = 0; i < rows; i++)
                    sums[i * tiles + j] = pairs_added(sums[i * tiles + j], a + i * u->a_step, b + j * u->b_step);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < tiles; j++) sums_stored(u->sums + (first + i) * COLUMNS + j * 16, sums[i * tiles + j]);
}

#define VECTORS_OF(rows, tiles) \
    case rows: vectors(rows, tiles, &part, first); break

/* The same by vectors: as many rows together as there are registers for, the rows shared out evenly. */
static FOR_AVX512 void avx512_block(const Block *u, int64_t tiles) {
    Block part = *u;
    int64_t parts = up(u->rows, tiles <= 2 ? VECTOR_SUMS / 2 : VECTOR_SUMS / 4);
    for (int64_t i = 0; i < parts; i++, part.fetch = 0) {
        int64_t first = u->rows * i / parts, rows = u->rows * (i + 1) / parts - first;
        if (tiles == 1) {
            switch (rows) {
                VECTORS_OF(1, 1); VECTORS_OF(2, 1); VECTORS_OF(3, 1); VECTORS_OF(4, 1); VECTORS_OF(5, 1); VECTORS_OF(6, 1);
                VECTORS_OF(7, 1); VECTORS_OF(8, 1); VECTORS_OF(9, 1); VECTORS_OF(10, 1); VECTORS_OF(11, 1); VECTORS_OF(12, 1);
            }
        } else if (tiles == 2) {
            switch (rows) {
                VECTORS_OF(1, 2); VECTORS_OF(2, 2); VECTORS_OF(3, 2); VECTORS_OF(4, 2); VECTORS_OF(5, 2); VECTORS_OF(6, 2);
                VECTORS_OF(7, 2); VECTORS_OF(8, 2); VECTORS_OF(9, 2); VECTORS_OF(10, 2); VECTORS_OF(11, 2); VECTORS_OF(12, 2);
            }
        } else if (tiles == 3) {
            switch (rows) {
                VECTORS_OF(1, 3); VECTORS_OF(2, 3); VECTORS_OF(3, 3); VECTORS_OF(4, 3); VECTORS_OF(5, 3); VECTORS_OF(6, 3);
            }
        } else {
            switch (rows) {
                VECTORS_OF(1, 4); VECTORS_OF(2, 4); VECTORS_OF(3, 4); VECTORS_OF(4, 4); VECTORS_OF(5, 4); VECTORS_OF(6, 4);
            }
        }
    }
}
