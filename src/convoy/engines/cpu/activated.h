/* Vectors of LANES floats, and the activations of kernels for CPUs. */
#include <stdint.h>
#if defined(__AVX512F__) && LANES == 16
#include <immintrin.h>
#define MASKED
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

enum { NO_ACTIVATION, RELU, RELU6 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE vec all_lanes(float value) {
    vec zero = {0};
    return value - zero;
}

/* The first `count` lanes, fewer than all of them. */
INLINE vec first_lanes(const float *from, int64_t count) {
#ifdef MASKED
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    vec value = {0};
    for (int64_t lane = 0; lane < count; lane++) value[lane] = from[lane];
    return value;
#endif
}

INLINE void put_first_lanes(float *to, vec value, int64_t count) {
#ifdef MASKED
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value);
#else
    for (int64_t lane = 0; lane < count; lane++) to[lane] = value[lane];
#endif
}

/* NaN stays. */
INLINE vec activated(vec value, int64_t activation) {
    if (activation != NO_ACTIVATION) value = (vec)((mask)value & ~(mask)(value < all_lanes(0.0f)));
    if (activation == RELU6) {
        mask above = (mask)(value > all_lanes(6.0f));
        value = (vec)(((mask)all_lanes(6.0f) & above) | ((mask)value & ~above));
    }
    return value;
}

