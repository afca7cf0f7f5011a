#define N 2
#define C 3
#define H 8
#define W 7
#define K 4
#define P 4
#define Q 4
#define STRIDE_H 2
#define STRIDE_W 2
#define PAD_H 1
#define PAD_W 1
#define PITCH 5
#define IMAGE_ROWS 5
#define REACH_H 1
#define PLANES 6
#define PLANE 80
#define PHASES 3
#define LANES 8
#define VECTORS 2
#define TILE 16
#define SPAN 24
#define BIAS 1
#define RESIDUAL 1
#define RELU 1
#define RELU6 1
#define HALF 0
typedef float element;

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

#define COPY16(to, from) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define SHARED extern __shared__ __align__(16) element staged[]
#endif


/* Copy one tile's part of some planes to shared memory, 16 bytes a thread, without waiting for it. */
static __device__ __forceinline__ void stage(element *to, const element *from, int planes)
{
    const int many = 16 / sizeof(element), pieces = SPAN / many;
#pragma unroll 1
    for (int i = threadIdx.x; i < planes * pieces; i += LANES) {
        const int plane = i / pieces, place = i % pieces * many;
        COPY16(to + plane * SPAN + place, from + (long long)plane * PLANE + place);
    }
}

#if BIAS
#define BIASED(k, v) ((v) + bias[k])
#else
#define BIASED(k, v) (v)
#endif
#if RESIDUAL
#define ADDED(k, v) ((v) + wide(residual[to + k##LL * P * Q]))
#else
#define ADDED(k, v) (v)
#endif
#if RELU6
#define ACTIVE(v) ((v) < 0 ? 0.0f : (v) > 6 ? 6.0f : (v))
#elif RELU
#define ACTIVE(v) ((v) < 0 ? 0.0f : (v))
#else
#define ACTIVE(v) (v)
#endif
#define RESULT(k, sum) { const float s = ADDED(k, BIASED(k, sum)); y[to + k##LL * P * Q] = narrow(ACTIVE(s)); }
extern "C" __global__ void __launch_bounds__(LANES)
part_0(const element *__restrict__ planes, const float *__restrict__ bias,
    const element *__restrict__ residual, element *__restrict__ y)
{
    const element *from = planes + (long long)blockIdx.x * TILE;
    SHARED;
    switch (blockIdx.y) {
    case 0: {
    float a0_0 = 0, a0_1 = 0;
    stage(staged + 0, from + 0LL * PLANE, 1);
    COMMIT;
    stage(staged + 48, from + 5LL * PLANE, 1);
    COMMIT;
    WAIT(1);
    __syncthreads();
    {
    const element *x = staged + 0 + threadIdx.x;
    { const float x0 = wide(x[0]), x1 = wide(x[8]);
    a0_0 = fmaf(x0, 0x0.0p+0f, a0_0); a0_1 = fmaf(x1, 0x0.0p+0f, a0_1);
    }
    }
    __syncthreads();
    WAIT(0);
    __syncthreads();
    {
    const element *x = staged + 48 + threadIdx.x;
    { const float x0 = wide(x[0]), x1 = wide(x[8]);
    a0_0 = fmaf(x0, 0x1.0000000000000p-2f, a0_0); a0_1 = fmaf(x1, 0x1.0000000000000p-2f, a0_1);
    }
    }
    {
    const int at = blockIdx.x * TILE + 0 + threadIdx.x;
    const int line = at / PITCH, q = at % PITCH, image = line / IMAGE_ROWS, p = line % IMAGE_ROWS;
    if (q < Q && p < P && image < N) {
        const long long to = ((long long)image * K * P + p) * Q + q;
        RESULT(0, a0_0);
    }
    }
    {
    const int at = blockIdx.x * TILE + 8 + threadIdx.x;
    const int line = at / PITCH, q = at % PITCH, image = line / IMAGE_ROWS, p = line % IMAGE_ROWS;
    if (q < Q && p < P && image < N) {
        const long long to = ((long long)image * K * P + p) * Q + q;
        RESULT(0, a0_1);
    }
    }
    } break;
    case 1: {
    float a0_0 = 0, a0_1 = 0, a1_0 = 0, a1_1 = 0;
    stage(staged + 0, from + 0LL * PLANE, 1);
    COMMIT;
    stage(staged + 48, from + 4LL * PLANE, 2);
    COMMIT;
    WAIT(1);
    __syncthreads();
    {
    const element *x = staged + 0 + threadIdx.x;
    { const float x0 = wide(x[0]), x1 = wide(x[8]);
    a0_0 = fmaf(x0, 0x1.0000000000000p-1f, a0_0); a0_1 = fmaf(x1, 0x1.0000000000000p-1f, a0_1);
    }
    { const float x0 = wide(x[6]), x1 = wide(x[14]);
    a1_0 = fmaf(x0, 0x1.8000000000000p-1f, a1_0); a1_1 = fmaf(x1, 0x1.8000000000000p-1f, a1_1);
    }
    }
    __syncthreads();
    WAIT(0);
    __syncthreads();
    {
    const element *x = staged + 48 + threadIdx.x;
    { const float x0 = wide(x[5]), x1 = wide(x[13]);
    a0_0 = fmaf(x0, 0x1.0000000000000p+0f, a0_0); a0_1 = fmaf(x1, 0x1.0000000000000p+0f, a0_1);
    }
    { const float x0 = wide(x[24]), x1 = wide(x[32]);
    a1_0 = fmaf(x0, 0x1.4000000000000p+0f, a1_0); a1_1 = fmaf(x1, 0x1.4000000000000p+0f, a1_1);
    }
    }
    {
    const int at = blockIdx.x * TILE + 0 + threadIdx.x;
    const int line = at / PITCH, q = at % PITCH, image = line / IMAGE_ROWS, p = line % IMAGE_ROWS;
    if (q < Q && p < P && image < N) {
        const long long to = ((long long)image * K * P + p) * Q + q;
        RESULT(1, a0_0);
        RESULT(3, a1_0);
    }
    }
    {
    const int at = blockIdx.x * TILE + 8 + threadIdx.x;
    const int line = at / PITCH, q = at % PITCH, image = line / IMAGE_ROWS, p = line % IMAGE_ROWS;
    if (q < Q && p < P && image < N) {
        const long long to = ((long long)image * K * P + p) * Q + q;
        RESULT(1, a0_1);
        RESULT(3, a1_1);
    }
    }
    } break;
    case 2: {
    float a0_0 = 0, a0_1 = 0;
    {
    const int at = blockIdx.x * TILE + 0 + threadIdx.x;
    const int line = at / PITCH, q = at % PITCH, image = line / IMAGE_ROWS, p = line % IMAGE_ROWS;
    if (q < Q && p < P && image < N) {
        const long long to = ((long long)image * K * P + p) * Q + q;
        RESULT(2, a0_0);
    }
    }
    {
    const int at = blockIdx.x * TILE + 8 + threadIdx.x;
    const int line = at / PITCH, q = at % PITCH, image = line / IMAGE_ROWS, p = line % IMAGE_ROWS;
    if (q < Q && p < P && image < N) {
        const long long to = ((long long)image * K * P + p) * Q + q;
        RESULT(2, a0_1);
    }
    }
    } break;
    }
}
