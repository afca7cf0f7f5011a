/* Vectors of LANES floats, and the activations of kernels for CPUs. */
#include <stdint.h>

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

/* NaN stays. */
INLINE vec activated(vec value, int64_t activation) {
    if (activation != NO_ACTIVATION) value = (vec)((mask)value & ~(mask)(value < all_lanes(0.0f)));
    if (activation == RELU6) {
        mask above = (mask)(value > all_lanes(6.0f));
        value = (vec)(((mask)all_lanes(6.0f) & above) | ((mask)value & ~above));
    }
    return value;
}

