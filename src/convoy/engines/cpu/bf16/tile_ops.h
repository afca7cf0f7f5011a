/* The instructions for products of bf16 that the kernels use, by the names of this header: AMX's tiles and VDPBF16PS.
 *
 * With EMULATED they are plain C with the results that Intel's manual gives bit for bit, so that a kernel runs on any processor:
 * inputs that are denormal count as zero, sums are rounded to the nearest even number, and denormal sums become zero. Otherwise the
 * functions that use them are marked FOR_AMX or FOR_AVX512, whatever processor the rest of the file is compiled for. */
typedef uint16_t bf16;

enum { TILE_ROWS = 16, TILE_BYTES = 64, LINE_FLOATS = 16 };

#ifdef EMULATED

#define FOR_AMX
#define FOR_AVX512
typedef float sums16 __attribute__((vector_size(64), aligned(4), may_alias));

static inline float from_bits(uint32_t bits) {
    union {
        uint32_t bits;
        float number;
    } found = {bits};
    return found.number;
}

static inline uint32_t to_bits(float number) {
    union {
        float number;
        uint32_t bits;
    } found = {number};
    return found.bits;
}

static inline float tile_value(bf16 value) {
    return from_bits((value & 0x7f80) ? (uint32_t)value << 16 : (uint32_t)(value & 0x8000) << 16);
}

static inline float tile_flushed(float value) { return __builtin_fabsf(value) < 1.17549435e-38f ? __builtin_copysignf(0.0f, value) : value; }

static _Thread_local struct {
    uint8_t tile[8][TILE_ROWS][TILE_BYTES];
} tile_file;

#define TILES_FENCE()
#define TILES_BEGIN() __builtin_memset(&tile_file, 0, sizeof tile_file)
#define TILES_END() __builtin_memset(&tile_file, 0xff, sizeof tile_file)
#define TILE_ZERO(t) __builtin_memset(tile_file.tile[t], 0, sizeof tile_file.tile[t])
#define TILE_LOAD(t, from, step) \
    for (int row_ = 0; row_ < TILE_ROWS; row_++) __builtin_memcpy(tile_file.tile[t][row_], (const uint8_t *)(from) + row_ * (step), TILE_BYTES)
#define TILE_STORE(t, to, step) \
    for (int row_ = 0; row_ < TILE_ROWS; row_++) __builtin_memcpy((uint8_t *)(to) + row_ * (step), tile_file.tile[t][row_], TILE_BYTES)
#define TILE_DP(sum, a, b) tile_dp((void *)tile_file.tile[sum], (const void *)tile_file.tile[a], (const void *)tile_file.tile[b])

/* TDPBF16PS: even and odd products of a row are summed apart, then both sums are added to the tile. */
static __attribute__((noinline)) void tile_dp(float *sum, const bf16 *a, const bf16 *b) {
    for (int m = 0; m < TILE_ROWS; m++)
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < 16; k++) {
                even = tile_flushed(__builtin_fmaf(tile_value(a[m * 32 + 2 * k]), tile_value(b[k * 32 + 2 * n]), even));
                odd = tile_flushed(__builtin_fmaf(tile_value(a[m * 32 + 2 * k + 1]), tile_value(b[k * 32 + 2 * n + 1]), odd));
            }
            sum[m * 16 + n] = tile_flushed(tile_flushed(sum[m * 16 + n]) + tile_flushed(even + odd));
        }
}

/* VDPBF16PS with one pair of values for all lanes: the odd product is added first. */
static __attribute__((noinline)) sums16 pairs_added(sums16 sum, const bf16 *pair, const bf16 *row) {
    for (int n = 0; n < 16; n++) {
        float with_odd = tile_flushed(__builtin_fmaf(tile_value(pair[1]), tile_value(row[2 * n + 1]), tile_flushed(sum[n])));
        sum[n] = tile_flushed(__builtin_fmaf(tile_value(pair[0]), tile_value(row[2 * n]), with_odd));
    }
    return sum;
}

static inline sums16 no_sums(void) { return (sums16){0}; }
static inline sums16 sums_loaded(const float *from) { return *(const sums16 *)from; }
static inline void sums_stored(float *to, sums16 sum) { *(sums16 *)to = sum; }

static inline sums16 bf16_loaded(const bf16 *from) {
    sums16 found;
    for (int n = 0; n < 16; n++) found[n] = from_bits((uint32_t)from[n] << 16);
    return found;
}

/* VCVTNEPS2BF16: to the nearest, of two the even one; denormal values become zero. */
static inline void bf16_stored(bf16 *to, sums16 sum) {
    for (int n = 0; n < 16; n++) {
        uint32_t bits = to_bits(tile_flushed(sum[n]));
        to[n] = sum[n] != sum[n] ? bits >> 16 | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    }
}

/* The larger and the smaller of both; NaN in `x` stays. */
static inline sums16 not_below(sums16 x, float bound) {
    for (int n = 0; n < 16; n++) x[n] = x[n] < bound ? bound : x[n];
    return x;
}

static inline sums16 not_above(sums16 x, float bound) {
    for (int n = 0; n < 16; n++) x[n] = x[n] > bound ? bound : x[n];
    return x;
}

static int64_t amx_permitted(void) { return 1; }

#else

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOR_AMX __attribute__((target("amx-tile,amx-bf16")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
typedef __m512 sums16;

static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_layout __attribute__((aligned(64))) = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* gcc does not know that a tile's load reads memory: what was written before stays before. */
#define TILES_FENCE() __asm__ volatile("" ::: "memory")
#define TILES_BEGIN() _tile_loadconfig(&tile_layout)
#define TILES_END() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, from, step) _tile_loadd(t, from, step)
#define TILE_STORE(t, to, step) _tile_stored(t, to, step)
#define TILE_DP(sum, a, b) _tile_dpbf16ps(sum, a, b)

#define INLINE512 static inline __attribute__((always_inline)) FOR_AVX512

INLINE512 sums16 pairs_added(sums16 sum, const bf16 *pair, const bf16 *row) {
    int32_t both;
    __builtin_memcpy(&both, pair, sizeof both);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(row), (__m512bh)_mm512_set1_epi32(both));
}

INLINE512 sums16 no_sums(void) { return _mm512_setzero_ps(); }
INLINE512 sums16 sums_loaded(const float *from) { return _mm512_loadu_ps(from); }
INLINE512 void sums_stored(float *to, sums16 sum) { _mm512_storeu_ps(to, sum); }

INLINE512 sums16 bf16_loaded(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE512 void bf16_stored(bf16 *to, sums16 sum) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(sum)); }
INLINE512 sums16 not_below(sums16 x, float bound) { return _mm512_max_ps(_mm512_set1_ps(bound), x); }
INLINE512 sums16 not_above(sums16 x, float bound) { return _mm512_min_ps(_mm512_set1_ps(bound), x); }

/* Linux keeps the tiles' registers from a process until it asks for them (ARCH_REQ_XCOMP_PERM of XTILEDATA). Asked once. */
static int64_t amx_permitted(void) {
    static int64_t known; /* 1: yes, 2: no */
    int64_t found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
#ifdef SYS_arch_prctl
        found = syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 1 : 2;
#else
        found = 2;
#endif
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == 1;
}

#endif
