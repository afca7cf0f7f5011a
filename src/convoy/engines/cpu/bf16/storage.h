/* Values as they lie in memory, bf16 with BF16 and fp32 without, and as the kernels compute with them: vectors of fp32.
 * activated.h stands before this. */
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec widened(halves from) { return (vec)(__builtin_convertvector(from, words) << 16); }

/* To the nearest, of two the even one; NaN stays NaN. */
INLINE halves narrowed(vec value) {
    words bits = (words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (words)(value != value);
    return __builtin_convertvector((nan & ((bits >> 16) | 0x40)) | (~nan & rounded), halves);
}

#ifdef BF16
typedef uint16_t stored;
INLINE vec stored_lanes(const stored *from) { return widened(*(const halves *)from); }
INLINE void put_stored_lanes(stored *to, vec value) { *(halves *)to = narrowed(value); }

INLINE vec first_stored_lanes(const stored *from, int64_t count) {
    halves value = {0};
    for (int64_t lane = 0; lane < count; lane++) value[lane] = from[lane];
    return widened(value);
}

INLINE void put_first_stored_lanes(stored *to, vec value, int64_t count) {
    halves rounded = narrowed(value);
    for (int64_t lane = 0; lane < count; lane++) to[lane] = rounded[lane];
}
#else
typedef float stored;
INLINE vec stored_lanes(const stored *from) { return *(const vec *)from; }
INLINE void put_stored_lanes(stored *to, vec value) { *(vec *)to = value; }
INLINE vec first_stored_lanes(const stored *from, int64_t count) { return first_lanes(from, count); }
INLINE void put_first_stored_lanes(stored *to, vec value, int64_t count) { put_first_lanes(to, value, count); }
#endif
