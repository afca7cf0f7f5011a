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

static __constant__ int phases[][4] = {{0, 0, 1, 4}, {0, 1, 0, 4}, {1, 1, 0, 4}};
static __constant__ int channels[] = {0, 2};

extern "C" __global__ void __launch_bounds__(256) pad(const element *__restrict__ x, element *__restrict__ planes)
{
    const long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= (long long)PLANES * PLANE)
        return;
    const int plane = (int)(at / PLANE), place = (int)(at % PLANE);
    const int line = place / PITCH, column = place % PITCH;
    const int image = line / IMAGE_ROWS < N ? line / IMAGE_ROWS : N - 1;
    const int *phase = phases[plane % PHASES];
    const int h = (line - image * IMAGE_ROWS) * STRIDE_H + phase[0] - PAD_H;
    const int w = column * STRIDE_W + phase[1] - PAD_W;
    element v = 0;
    if (h >= 0 && h < H && column >= phase[2] && column < phase[3])
        v = x[(((long long)image * C + channels[plane / PHASES]) * H + h) * W + w];
    planes[at] = v;
}
