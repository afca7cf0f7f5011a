/* LANES, the floats of a vector register, and BF16, if values are stored so, are given by the compiler's flags; activated.h stands
 * before this.
 *
 * Values in NHWC, concatenated along channels, scaled and shifted channel by channel, and activated:
 * y = activation(shift + x * scale), each value read once and written once. The scales may be one set for each image.
 *
 * A unit is some pixels of an image. Of each piece it takes a few registers of channels at a time through all of them, so that
 * scales and shifts stay in registers.
 */
#define VECTORS 4            /* registers of channels at a time: whole lines of the cache, side by side */
#define PIXELS 16            /* of a unit: what it writes stays in the first cache until its lines are whole */
#define WORTH_A_THREAD 16384 /* values that a thread must get for its start to be worth it */

typedef struct {
    const stored *x, *scale, *shift; /* no shift: NULL */
    stored *y;
    int64_t x_step, y_step, pixels; /* values from pixel to pixel */
} Piece;

INLINE void columns(const int vectors, const Piece *u, int64_t channel, int64_t activation) {
    vec scale[VECTORS], shift[VECTORS];
    for (int v = 0; v < vectors; v++) {
        scale[v] = stored_lanes(u->scale + channel + v * LANES);
        shift[v] = u->shift ? stored_lanes(u->shift + channel + v * LANES) : all_lanes(0.0f);
    }
    for (int64_t i = 0; i < u->pixels; i++)
        for (int v = 0; v < vectors; v++) {
            vec x = stored_lanes(u->x + i * u->x_step + channel + v * LANES);
            put_stored_lanes(u->y + i * u->y_step + channel + v * LANES, activated_for_storage(shift[v] + x * scale[v], activation));
        }
}

/* Some pixels of a piece. Its last channels may be fewer than a register has. */
INLINE void scaled(const Piece *u, int64_t channels, int64_t activation) {
    int64_t at = 0;
    for (; at + VECTORS * LANES <= channels; at += VECTORS * LANES) columns(VECTORS, u, at, activation);
    for (; at + LANES <= channels; at += LANES) columns(1, u, at, activation);
    int64_t left = channels - at;
    if (left) {
        vec scale = first_stored_lanes(u->scale + at, left);
        vec shift = u->shift ? first_stored_lanes(u->shift + at, left) : all_lanes(0.0f);
        for (int64_t i = 0; i < u->pixels; i++) {
            vec x = first_stored_lanes(u->x + i * u->x_step + at, left);
            put_first_stored_lanes(u->y + i * u->y_step + at, activated_for_storage(shift + x * scale, activation), left);
        }
    }
    smooth_stored_rows(u->y, u->y_step, u->pixels, channels, activation);
}

/* The whole problem: the pieces, scale, shift or NULL, and what they make. Settings: images, pixels of one, whether each has scales
 * of its own, pieces, threads, the activation, and the channels of each piece. */
void NAMED(convoy_scale)(const int64_t *settings, void *const *tensors) {
    int64_t images = settings[0], pixels = settings[1], own = settings[2], pieces = settings[3], threads = settings[4];
    int64_t activation = settings[5], whole = 0, blocks = up(pixels, PIXELS);
    const int64_t *channels = settings + 6;
    const stored *scale = tensors[pieces], *shift = tensors[pieces + 1];
    stored *y = tensors[pieces + 2];
    for (int64_t i = 0; i < pieces; i++) whole += channels[i];
    threads = most(1, least(threads, images * pixels * whole / WORTH_A_THREAD));
    PARALLEL_FOR(unit, images * blocks, threads) {
        int64_t image = unit / blocks, in_image = unit % blocks * PIXELS, first = image * pixels + in_image, channel = 0;
        for (int64_t i = 0; i < pieces; channel += channels[i++]) {
            const stored *x = tensors[i];
            Piece u = {
                .x = x + first * channels[i],
                .scale = scale + own * image * whole + channel,
                .shift = shift ? shift + channel : 0,
                .y = y + first * whole + channel,
                .x_step = channels[i],
                .y_step = whole,
                .pixels = least(PIXELS, pixels - in_image),
            };
            scaled(&u, channels[i], activation);
        }
    }
}
