/* LANES, the floats of a vector register, and BF16, if values are stored so, are given by the compiler's flags; activated.h and layer.h
 * stand before this.
 *
 * A 1x1 convolution of values that are multiplied with a gate first, one value for each image and channel: y = conv(x * gate). Some pixels
 * at a time are multiplied into a slot, where the convolution's kernel reads them before another cache has them.
 */
typedef struct {
    int64_t images, pixels, bands, threads, slot_values;
    Layer layer; /* of an image whose pixels are rows of one */
} Gated;

#define TOGETHER_PIXELS 6 /* the convolution does so many together */

INLINE void multiply(stored *to, const stored *x, const stored *gate, int64_t pixels, int64_t channels) {
    for (int64_t i = 0; i < pixels; i++, to += channels, x += channels) {
        int64_t c = 0;
        for (; c + LANES <= channels; c += LANES) put_stored_lanes(to + c, stored_lanes(x + c) * stored_lanes(gate + c));
        for (; c < channels; c++) to[c] = to_stored(from_stored(x[c]) * from_stored(gate[c]));
    }
}

/* x, gate, residual or NULL, y, `threads` slots of `slot_values`, and the kernel's own tensors. */
void NAMED(convoy_gated_1x1)(const Gated *z, void *const *tensors) {
    int64_t channels = z->layer.settings[C], filters = z->layer.settings[K], blocks = up(z->pixels, TOGETHER_PIXELS);
    const stored *x = tensors[0], *gate = tensors[1], *residual = tensors[2];
    stored *y = tensors[3], *slots = tensors[4];
    int64_t units = z->images * z->bands;
    PARALLEL_FOR(unit, units, least(z->threads, units)) {
        int64_t image = unit / z->bands, band = unit % z->bands;
        Rows rows = {blocks * band / z->bands * TOGETHER_PIXELS, blocks * (band + 1) / z->bands * TOGETHER_PIXELS};
        rows.end = least(rows.end, z->pixels);
        stored *slot = slots + THREAD_NUMBER() * z->slot_values;
        int64_t first = image * z->pixels + rows.first;
        multiply(slot, x + first * channels, gate + image * channels, rows.end - rows.first, channels);
        ALONE(call_layer(&z->layer, rows, slot, residual ? residual + first * filters : 0, y + first * filters, tensors + 5));
    }
}
