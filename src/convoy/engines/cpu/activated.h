/* Vectors of LANES floats, the activations of kernels for CPUs, and values as they are stored: bf16 with BF16, else fp32. */
#if defined(__AVX512F__) && LANES == 16
#include <immintrin.h>
#define MASKED
#elif defined(__AVX__) && LANES == 8
#include <immintrin.h>
#define YMM
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 64") /* before a loop over registers, whose number the compiler knows */

enum { NO_ACTIVATION, RELU, RELU6, SILU, HARDSWISH, HARDSIGMOID, SIGMOID, GELU };

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

INLINE vec chosen(mask which, vec yes, vec no) { return (vec)(((mask)yes & which) | ((mask)no & ~which)); }

/* The larger and the smaller of both; NaN in `x` stays. */
INLINE vec at_least(vec x, float bound) {
#ifdef MASKED
    return (vec)_mm512_max_ps((__m512)all_lanes(bound), (__m512)x);
#elif defined(YMM)
    return (vec)_mm256_max_ps((__m256)all_lanes(bound), (__m256)x);
#else
    return chosen((mask)(x < all_lanes(bound)), all_lanes(bound), x);
#endif
}

INLINE vec at_most(vec x, float bound) {
#ifdef MASKED
    return (vec)_mm512_min_ps((__m512)all_lanes(bound), (__m512)x);
#elif defined(YMM)
    return (vec)_mm256_min_ps((__m256)all_lanes(bound), (__m256)x);
#else
    return chosen((mask)(x > all_lanes(bound)), all_lanes(bound), x);
#endif
}

/* The activations that cost an instruction or two, all others as if they were none: for sums in registers. NaN stays. */
INLINE vec activated(vec value, int64_t activation) {
    if (activation == RELU || activation == RELU6) value = (vec)((mask)value & ~(mask)(value < all_lanes(0.0f)));
    if (activation == RELU6) value = at_most(value, 6.0f);
    return value;
}

/* The functions below take several values, and go step by step through all of them: one alone waits for each of its sums. */
#define EACH UNROLLED for (int i = 0; i < count; i++)
#define TOGETHER 4

#define WHOLE 12582912.0f /* 1.5 * 2^23: added to a number, it leaves no fraction, and the whole number is in the last bits */

/* 1 + e^x. An x below -30 is as good as -30, what is too large is infinite, NaN stays.
 *
 * e^x is 2^n e^r with |r| <= ln(2) / 2, of which 1 + r + r^2 (a + b r + c r^2 + d r^3 + e r^4) is 3e-9 off at most (a minimax fit):
 * within one unit in the last place. ln(2) is subtracted in two parts, with more digits than one float has. */
INLINE void one_and_exponential(vec *x, const int count) {
    static const float factors[] = {1.381446697e-3f, 8.368780441e-3f, 4.166839422e-2f, 1.666652011e-1f, 4.999999341e-1f, 1.0f, 1.0f};
    vec whole[TOGETHER], n[TOGETHER], r[TOGETHER];
    EACH x[i] = at_most(at_least(x[i], -30.0f), 88.8f);
    EACH whole[i] = x[i] * 1.44269504f + WHOLE;
    EACH n[i] = whole[i] - WHOLE;
    EACH r[i] = x[i] - n[i] * 0.693359375f;
    EACH r[i] -= n[i] * -2.12194440e-4f;
    EACH x[i] = factors[0] * r[i] + factors[1];
    UNROLLED for (int term = 2; term < 7; term++) EACH x[i] = x[i] * r[i] + factors[term];
#ifdef MASKED
    EACH x[i] = (vec)_mm512_scalef_ps((__m512)x[i], (__m512)n[i]) + 1.0f;
#else
    EACH x[i] = x[i] * (vec)(((mask)whole[i] + (127 - 1)) << 23) * 2.0f + 1.0f; /* half of 2^n: all of it may be no number */
#endif
}

/* |x| (erf(|x| / sqrt(2)) / 2 + 1 / 2 with the sign of x), with erf(|x| / sqrt(2)) / (2 |x|) as a polynomial of
 * w = 2 x^2 / GELU_END^2 - 1 in [-1, 1], where all its coefficients are small: within 2e-7 |x| (PyTorch's is within 2.7e-7). From
 * GELU_END on the error function is one. No sum has two products: compilers would differ in which of them they round. */
#define GELU_END 5.2f

INLINE void gelu(vec *x, const int count) {
    static const float factors[] = {2.0638049e-4f,   -5.6580844e-4f, 5.8926956e-4f,  -9.6865592e-4f, 2.6751582e-3f,
                                    -5.0778739e-3f,  8.0033038e-3f,  -1.2348059e-2f, 1.8135715e-2f,  -2.4764730e-2f,
                                    3.1962108e-2f,   -3.9925266e-2f, 5.0026119e-2f,  -6.7743808e-2f, 1.3594998e-1f};
    vec w[TOGETHER], series[TOGETHER];
    EACH w[i] = x[i] * x[i] * (2.0f / (GELU_END * GELU_END)) - 1.0f;
    EACH series[i] = all_lanes(factors[0]);
    UNROLLED for (int term = 1; term < 15; term++) EACH series[i] = series[i] * w[i] + factors[term];
    EACH {
        vec size = (vec)((mask)x[i] & 0x7fffffff);
        vec half = chosen((mask)(size < all_lanes(GELU_END)), size * series[i], all_lanes(0.5f));
        x[i] = size * (half + (vec)(((mask)x[i] & (int32_t)0x80000000) | (mask)all_lanes(0.5f)));
    }
}

INLINE void smooth(vec *x, const int count, int64_t activation) {
    if (activation == GELU) {
        gelu(x, count);
    } else if (activation == SILU || activation == SIGMOID) {
        vec below[TOGETHER];
        EACH below[i] = -x[i];
        one_and_exponential(below, count);
        EACH x[i] = (activation == SILU ? x[i] : all_lanes(1.0f)) / below[i];
    } else {
        EACH {
            vec sixth = activated(x[i] + 3.0f, RELU6) / 6.0f;
            if (activation == HARDSWISH) sixth *= x[i];
            x[i] = sixth;
        }
    }
}

INLINE vec smooth_one(vec x, int64_t activation) {
    smooth(&x, 1, activation);
    return x;
}

/* The other activations, in place, on rows of channels that were just written: apart from the sums, whose registers they want. Two
 * registers of two rows at a time; of a last row alone, four. */
static __attribute__((noinline)) void smooth_rows(float *y, int64_t step, int64_t rows, int64_t channels, int64_t activation) {
    for (int64_t i = 0; i < rows; i += 2, y += 2 * step) {
        int64_t alone = i + 1 == rows, width = (alone ? TOGETHER : 2) * LANES, c = 0;
        float *third = y + (alone ? 2 * LANES : step);
        for (; c + width <= channels; c += width) {
            vec values[TOGETHER];
            UNROLLED for (int j = 0; j < TOGETHER; j++) values[j] = *(const vec *)((j < 2 ? y : third) + c + j % 2 * LANES);
            smooth(values, TOGETHER, activation);
            UNROLLED for (int j = 0; j < TOGETHER; j++) *(vec *)((j < 2 ? y : third) + c + j % 2 * LANES) = values[j];
        }
        for (int64_t second = 0; second <= !alone; second++) {
            float *row = y + second * step;
            int64_t at = c;
            for (; at + LANES <= channels; at += LANES) *(vec *)(row + at) = smooth_one(*(const vec *)(row + at), activation);
            if (at < channels) put_first_lanes(row + at, smooth_one(first_lanes(row + at, channels - at), activation), channels - at);
        }
    }
}

INLINE int64_t is_smooth(int64_t activation) { return activation > RELU6; }

/* `activated` of several values: one branch for all of them. */
INLINE void activate(vec *values, const int count, int64_t activation) {
    if (activation == RELU || activation == RELU6)
        UNROLLED for (int i = 0; i < count; i++) values[i] = activated(values[i], RELU);
    if (activation == RELU6)
        UNROLLED for (int i = 0; i < count; i++) values[i] = at_most(values[i], 6.0f);
}

typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec widened(halves from) { return (vec)(__builtin_convertvector(from, words) << 16); }

/* To the nearest, of two the even one; NaN stays NaN. */
INLINE halves narrowed(vec value) {
#if defined(MASKED) && defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)value); /* denormal numbers become zero */
#else
    words bits = (words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (words)(value != value);
    return __builtin_convertvector((nan & ((bits >> 16) | 0x40)) | (~nan & rounded), halves);
#endif
}

#ifdef BF16
#define NAMED(name) name##_bf16
typedef uint16_t stored;

INLINE float from_stored(stored value) {
    union {
        uint32_t bits;
        float number;
    } found = {(uint32_t)value << 16};
    return found.number;
}

INLINE stored to_stored(float value) {
    union {
        float number;
        uint32_t bits;
    } found = {value};
    return value != value ? found.bits >> 16 | 0x40 : (found.bits + 0x7fff + ((found.bits >> 16) & 1)) >> 16;
}

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

static __attribute__((noinline)) vec smooth_apart(vec x, int64_t activation) { return smooth_one(x, activation); }

/* An activation before a value is rounded: any. */
INLINE vec activated_for_storage(vec x, int64_t activation) {
    return is_smooth(activation) ? smooth_apart(x, activation) : activated(x, activation);
}
INLINE void smooth_stored_rows(stored *y, int64_t step, int64_t rows, int64_t channels, int64_t activation) {}

/* `activated_for_storage` of several values. */
INLINE void activate_for_storage(vec *values, const int count, int64_t activation) {
    if (is_smooth(activation))
        UNROLLED for (int i = 0; i < count; i++) values[i] = smooth_apart(values[i], activation);
    else
        activate(values, count, activation);
}
#else
#define NAMED(name) name
typedef float stored;
INLINE float from_stored(stored value) { return value; }
INLINE stored to_stored(float value) { return value; }
INLINE vec stored_lanes(const stored *from) { return *(const vec *)from; }
INLINE void put_stored_lanes(stored *to, vec value) { *(vec *)to = value; }
INLINE vec first_stored_lanes(const stored *from, int64_t count) { return first_lanes(from, count); }
INLINE void put_first_stored_lanes(stored *to, vec value, int64_t count) { put_first_lanes(to, value, count); }

/* The activations that cost little; the others follow, on rows that were just written. */
INLINE vec activated_for_storage(vec x, int64_t activation) { return activated(x, activation); }
INLINE void activate_for_storage(vec *values, const int count, int64_t activation) { activate(values, count, activation); }
INLINE void smooth_stored_rows(stored *y, int64_t step, int64_t rows, int64_t channels, int64_t activation) {
    if (is_smooth(activation)) smooth_rows(y, step, rows, channels, activation);
}
#endif
