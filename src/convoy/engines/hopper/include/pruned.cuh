/* What generated kernels for pruned weights share: copies to shared memory, results. Before it come sizes and flags as macros,
   `element`, and unless RUN the tables `phases` and `channels` (engines/sparse_weights/codegen/emit_cuda.py). */

#ifndef CONVOY_HOST /* tests compile the code for threads of a CPU, with words of their own for what follows */
static __device__ __forceinline__ float wide(element v)
{
#if HALF
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    return v;
#endif
}

static __device__ __forceinline__ element narrow(float v)
{
#if HALF
    element h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
#else
    return v;
#endif
}

/* Copies to shared memory that are not waited for; where nothing is inside, the copy is a zero. */
#define COPY4(to, from, inside) \
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" \
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"((inside) ? 4 : 0) : "memory")
#define COPY16_INSIDE(to, from, inside) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" \
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"((inside) ? 16 : 0) : "memory")
#define COPY16(to, from) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
/* The multiply-adds of a piece, as instructions: compiled as expressions they take NVRTC more than twice as long. A thread's sums
   are operands from 0 on, then come the addresses of its inputs and of the values. */
typedef unsigned address;
#define ADDRESS(p) ((address)__cvta_generic_to_shared(p))
#define BEGIN_CODE(inputs, values) \
    asm volatile("{\n.reg .u32 x, w;\nmov.u32 x, %" #inputs ";\nmov.u32 w, %" #values ";\n"
#define LOAD1(word, at) ".reg .f32 x" #word ";\nld.shared.f32 x" #word ", [x+" #at "];\n"
#define LOAD2(word, at) \
    ".reg .f32 x" #word "x, x" #word "y;\nld.shared.v2.f32 {x" #word "x, x" #word "y}, [x+" #at "];\n"
#define FOUR_OF(name) name "x, " name "y, " name "z, " name "w"
#define LOAD4(word, at) \
    ".reg .f32 " FOUR_OF("x" #word) ";\nld.shared.v4.f32 {" FOUR_OF("x" #word) "}, [x+" #at "];\n"
#define VALUES(word, at) \
    ".reg .f32 " FOUR_OF("w" #word) ";\nld.shared.v4.f32 {" FOUR_OF("w" #word) "}, [w+" #at "];\n"
#define FMA(sum, input, value) "fma.rn.f32 %" #sum ", " #input ", " #value ", %" #sum ";\n"
#define FMA_BITS(sum, input, bits) "fma.rn.f32 %" #sum ", " #input ", 0f" #bits ", %" #sum ";\n"
#define SUM(a) "+f"(a)
#define END_CODE(...) "}" : __VA_ARGS__ : "r"(inputs), "r"(weights) : "memory");
#define SHARED extern __shared__ __align__(16) float staged[]
/* A linked function does not see that its arguments are a kernel's. */
#define GLOBAL(p) __builtin_assume(__isGlobal(p))
/* A group's function ends its thread: it need not put registers aside for a caller. */
#define GROUP __noinline__ __attribute__((noreturn))
#define END asm volatile("exit;"); __builtin_unreachable()
#if __CUDA_ARCH__ >= 900 /* the next kernel's blocks may come while this one runs; this one's wait for what the last wrote */
#define BEGIN asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define AWAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define BEGIN
#define AWAIT
#endif
#endif
#define BASE ((int)blockIdx.x % TILES * TILE) /* the tile's first position */
#if HALF /* converted on the way, which an asynchronous copy cannot do */
#define COPY(to, from, inside) (*(to) = (inside) ? wide(*(from)) : 0.0f)
#else
#define COPY(to, from, inside) COPY4(to, from, inside)
#endif
#if VECTORS == 4
typedef float4 WORDS;
#elif VECTORS == 2
typedef float2 WORDS;
#else
typedef float WORDS;
#endif

#if RUN
#if FOURS /* rows begin at multiples of four floats in memory and, SHIFT floats on, in shared memory: four are copied at once */
#define FLOATS 4
#define COPY_RUN COPY16_INSIDE
#else
#define FLOATS 1
#define COPY_RUN COPY
#endif

/* Where a thread's positions of a tile are in a channel's image; -1: outside of it. */
struct sources { int at[ROUNDS]; };
static __device__ __forceinline__ sources sources_of()
{
    sources found;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int at = BASE + FLOATS * ((int)threadIdx.x % ALONG + round * ALONG) - SHIFT, line = at / PITCH, column = at % PITCH;
        const int image = line / IMAGE_ROWS < N ? line / IMAGE_ROWS : N - 1;
        const int h = (line - image * IMAGE_ROWS) * STRIDE_H + ROW - PAD_H, w = column * STRIDE_W + COLUMN - PAD_W;
        const bool inside = at >= 0 && h >= 0 && h < H && w >= 0 && w < W;
        found.at[round] = inside ? image * (C * H * W) + h * W + w : -1;
    }
    return found;
}

/* Copy one tile's part of neighbouring planes to shared memory, with padding inside; ALONG threads a plane. */
static __device__ __forceinline__ void stage_run(
    float *to, const element *x, int first, int planes, const sources &source)
{
    const int start = threadIdx.x % ALONG;
    const element *from = x + (first + CHANNEL + threadIdx.x / ALONG) * (H * W);
    to += threadIdx.x / ALONG * SPAN + FLOATS * start;
#pragma unroll 1
    for (int plane = threadIdx.x / ALONG; plane < planes; plane += THREADS / ALONG) {
#pragma unroll
        for (int round = 0; round < ROUNDS; round++)
            if ((round + 1) * ALONG <= SPAN / FLOATS || start < SPAN / FLOATS - round * ALONG)
                COPY_RUN(to + FLOATS * round * ALONG, from + (source.at[round] < 0 ? 0 : source.at[round]),
                         source.at[round] >= 0);
        from += THREADS / ALONG * (H * W);
        to += THREADS / ALONG * SPAN;
    }
}
#else

/* Copy one tile's part of some planes to shared memory, with padding inside; ALONG threads a plane. */
static __device__ __forceinline__ void stage_list(float *to, const element *x, const int *list, int planes)
{
#pragma unroll 1
    for (int i = threadIdx.x % ALONG; i < SPAN; i += ALONG) {
        const int at = BASE + i, line = at / PITCH, column = at % PITCH;
        const int image = line / IMAGE_ROWS < N ? line / IMAGE_ROWS : N - 1;
#pragma unroll 4
        for (int plane = threadIdx.x / ALONG; plane < planes; plane += THREADS / ALONG) {
            const int *phase = phases[list[plane] % PHASES], channel = channels[list[plane] / PHASES];
            const int h = (line - image * IMAGE_ROWS) * STRIDE_H + phase[0] - PAD_H;
            const int w = column * STRIDE_W + phase[1] - PAD_W;
            const bool inside = h >= 0 && h < H && column >= phase[2] && column < phase[3];
            COPY(to + plane * SPAN + i, x + (inside ? ((image * C + channel) * H + h) * W + w : 0), inside);
        }
    }
}
#endif

/* Copy values to shared memory. */
static __device__ __forceinline__ void stage_values(float *to, const float *from, int count)
{
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < count; i += 4 * THREADS)
        COPY16(to + i, from + i);
}

/* Where a pixel of filter 0 is in y; -1: between the rows. */
static __device__ __forceinline__ int place_of(int at)
{
    const int line = at / PITCH, column = at % PITCH, image = line / IMAGE_ROWS, row = line % IMAGE_ROWS;
    return column < Q && row < P && image < N ? (image * K * P + row) * Q + column : -1;
}

static __device__ __forceinline__ float finished(float sum, int k, int to, const float *bias, const element *residual)
{
#if BIAS
    sum += bias[k];
#endif
#if RESIDUAL
    sum += wide(residual[to]);
#endif
#if RELU6
    sum = sum < 0 ? 0.0f : sum > 6 ? 6.0f : sum;
#elif RELU
    sum = sum < 0 ? 0.0f : sum;
#endif
    return sum;
}

#if WIDE_STORES /* a thread's pixels are all there, in one row, or none is */
typedef int places;
#define PLACE(lane) const places place = place_of(BASE + VECTORS * lane)
static __device__ __forceinline__ void store(
    int k, const places &place, const float *sums, const float *bias, const element *residual, element *y)
{
    if (place < 0)
        return;
    const int to = place + k * (P * Q);
    WORDS found;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        ((float *)&found)[v] = finished(sums[v], k, to + v, bias, residual);
    *(WORDS *)(y + to) = found;
}
#else
struct places { int to[VECTORS]; };
static __device__ __forceinline__ places places_of(int at)
{
    places found;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        found.to[v] = place_of(at + v);
    return found;
}
#define PLACE(lane) const places place = places_of(BASE + VECTORS * lane)
static __device__ __forceinline__ void store(
    int k, const places &place, const float *sums, const float *bias, const element *residual, element *y)
{
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int to = place.to[v] + k * (P * Q);
        if (place.to[v] >= 0)
            y[to] = narrow(finished(sums[v], k, to, bias, residual));
    }
}
#endif

#if SPLITS > 1
/* The sums of all splits for one filter and a thread's pixels, added in order, to y. */
static __device__ __forceinline__ void add_splits(
    int k, const float *from, int split, const places &place, const float *bias, const element *residual, element *y)
{
    float sums[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        sums[v] = 0;
#pragma unroll
    for (int i = 0; i < SPLITS; i++) {
        const WORDS found = *(const WORDS *)(from + i * split);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            sums[v] += ((const float *)&found)[v];
    }
    store(k, place, sums, bias, residual, y);
}
#endif
