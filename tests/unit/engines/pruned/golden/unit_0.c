#include <stddef.h>
#include <string.h>
#define HIDDEN __attribute__((visibility("hidden")))
typedef float vec __attribute__((vector_size(16)));
typedef float vec_at __attribute__((vector_size(16), aligned(4), may_alias));
#define LOAD(at) (*(const vec_at *)(at))
#define STORE(at, v) (*(vec_at *)(at) = (v))
#if !defined(CONVOY_PLAIN) && defined(__AVX512F__) && 4 == 16
#define SPREAD(b, at) __asm__("vbroadcastss %1, %0" : "=v"(b) : "m"(at))
#define FMA(a, x, b) __asm__("vfmadd231ps %1, %2, %0" : "+v"(a) : "v"(x), "v"(b))
#define FMA1(a, x, at) __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(a) : "v"(x), "m"(at))
#define FENCE __asm__ volatile("" ::: "memory");
#elif !defined(CONVOY_PLAIN) && defined(__FMA__) && 4 == 8
#define SPREAD(b, at) __asm__("vbroadcastss %1, %0" : "=x"(b) : "m"(at))
#define FMA(a, x, b) __asm__("vfmadd231ps %1, %2, %0" : "+x"(a) : "x"(x), "x"(b))
#define FMA1(a, x, at) do { vec b_; SPREAD(b_, at); FMA(a, x, b_); } while (0)
#define FENCE __asm__ volatile("" ::: "memory");
#else
#define SPREAD(b, at) (b) = (vec){0} + (at)
#define FMA(a, x, b) (a) += (x) * (b)
#define FMA1(a, x, at) (a) += (x) * (at)
#define FENCE
#endif
HIDDEN void piece_0_0(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_0_0(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = {0};
    FENCE { vec x0 = LOAD(x + 0);
    FMA1(a0_0, x0, w[0]);
    }
    STORE(y + 0, a0_0);
}
HIDDEN void piece_0_1(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_0_1(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = LOAD(y + 0);
    FENCE { vec x0 = LOAD(x + 400);
    FMA1(a0_0, x0, w[0]);
    }
    STORE(y + 0, a0_0);
}
HIDDEN void piece_1_0(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_1_0(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = {0};
    vec a1_0 = {0};
    FENCE { vec x0 = LOAD(x + 0);
    FMA1(a0_0, x0, w[0]);
    }
    FENCE { vec x0 = LOAD(x + 6);
    FMA1(a1_0, x0, w[1]);
    }
    STORE(y + 0, a0_0);
    STORE(y + 48, a1_0);
}
HIDDEN void piece_1_1(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_1_1(const float *restrict x, const float *restrict w, float *restrict y)
{
    vec a0_0 = LOAD(y + 0);
    vec a1_0 = LOAD(y + 48);
    FENCE { vec x0 = LOAD(x + 325);
    FMA1(a0_0, x0, w[0]);
    }
    FENCE { vec x0 = LOAD(x + 400);
    FMA1(a1_0, x0, w[1]);
    }
    STORE(y + 0, a0_0);
    STORE(y + 48, a1_0);
}
HIDDEN void piece_2_0(const float *restrict x, const float *restrict w, float *restrict y);
HIDDEN void piece_2_0(const float *restrict x, const float *restrict w, float *restrict y)
{
    (void)x, (void)w;
    vec a0_0 = {0};
    STORE(y + 0, a0_0);
}
