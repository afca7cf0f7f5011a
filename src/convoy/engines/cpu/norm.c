/* LANES, the floats of a vector register, is given by the compiler's flags; activated.h stands before this.
 *
 * A batch norm at inference in NHWC, fp32, of values that are concatenated along channels, with the activation behind it:
 * y = activation(shift + x * scale), each value read once and written once.
 *
 * A unit is some pixels. Of each piece it takes a few registers of channels at a time through all of them, so that scales and
 * shifts stay in registers.
 */
#define VECTORS 4            /* registers of channels at a time: whole lines of the cache, side by side */
#define PIXELS 16            /* of a unit: what it writes stays in the first cache until its lines are whole */
#define WORTH_A_THREAD 16384 /* values that a thread must get for its start to be worth it */

typedef struct {
    const float *x, *scale, *shift;
    float *y;
    int64_t x_step, y_step, pixels; /* floats from pixel to pixel */
} Piece;

INLINE void columns(const int vectors, const Piece *u, int64_t channel, int64_t activation) {
    vec scale[VECTORS], shift[VECTORS];
    for (int v = 0; v < vectors; v++) {
        scale[v] = *(const vec *)(u->scale + channel + v * LANES);
        shift[v] = *(const vec *)(u->shift + channel + v * LANES);
    }
    for (int64_t i = 0; i < u->pixels; i++)
        for (int v = 0; v < vectors; v++) {
            vec x = *(const vec *)(u->x + i * u->x_step + channel + v * LANES);
            *(vec *)(u->y + i * u->y_step + channel + v * LANES) = activated(shift[v] + x * scale[v], activation);
        }
}

/* Some pixels of a piece. Its last channels may be fewer than a register has. */
INLINE void normed(const Piece *u, int64_t channels, int64_t activation) {
    int64_t at = 0;
    for (; at + VECTORS * LANES <= channels; at += VECTORS * LANES) columns(VECTORS, u, at, activation);
    for (; at + LANES <= channels; at += LANES) columns(1, u, at, activation);
    int64_t left = channels - at;
    if (left == 0) return;
    vec scale = first_lanes(u->scale + at, left), shift = first_lanes(u->shift + at, left);
    for (int64_t i = 0; i < u->pixels; i++) {
        vec x = first_lanes(u->x + i * u->x_step + at, left);
        put_first_lanes(u->y + i * u->y_step + at, activated(shift + x * scale, activation), left);
    }
}

/* The whole problem: the pieces, scale, shift and what they make. Settings: pixels, pieces, threads, the activation, and the
 * channels of each piece. */
void convoy_norm(const int64_t *settings, void *const *tensors) {
    int64_t pixels = settings[0], pieces = settings[1], threads = settings[2], activation = settings[3];
    const int64_t *channels = settings + 4;
    const float *scale = tensors[pieces], *shift = tensors[pieces + 1];
    float *y = tensors[pieces + 2];
    int64_t whole = 0, units = up(pixels, PIXELS);
    for (int64_t i = 0; i < pieces; i++) whole += channels[i];
    threads = most(1, least(threads, pixels * whole / WORTH_A_THREAD));
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t unit = 0; unit < units; unit++) {
        int64_t first = unit * PIXELS, channel = 0;
        for (int64_t i = 0; i < pieces; channel += channels[i++]) {
            const float *x = tensors[i];
            Piece u = {
                .x = x + first * channels[i],
                .scale = scale + channel,
                .shift = shift + channel,
                .y = y + first * whole + channel,
                .x_step = channels[i],
                .y_step = whole,
                .pixels = least(PIXELS, pixels - first),
            };
            if (activation == NO_ACTIVATION)
                normed(&u, channels[i], NO_ACTIVATION);
            else
                normed(&u, channels[i], activation);
        }
    }
}
