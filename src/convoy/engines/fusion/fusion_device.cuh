// The device, as the generated kernels know it. The tests put a file of this name in front of it and run them on the CPU.
#pragma once

#define DEVICE static __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define SHARED __shared__
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define RESTRICT __restrict__

struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

DEVICE float to_float(float v) { return v; }
DEVICE float to_float(Half v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits));
  return r;
}
DEVICE float to_float(BFloat v) { return __uint_as_float((unsigned)v.bits << 16); }
template <class T> struct Rounded;
template <> struct Rounded<float> {
  static __device__ __forceinline__ float of(float v) { return v; }
};
template <> struct Rounded<Half> {
  static __device__ __forceinline__ Half of(float v) {
    Half r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
    return r;
  }
};
template <> struct Rounded<BFloat> {
  static __device__ __forceinline__ BFloat of(float v) {
    BFloat r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
    return r;
  }
};
template <class T> DEVICE T from_float(float v) { return Rounded<T>::of(v); }
DEVICE float from_bits(unsigned bits) { return __uint_as_float(bits); }

// FAST_EXPONENTIAL: by the special function unit, with a relative error of 2^-22 times |v|, for results in half types.
#ifdef FAST_EXPONENTIAL
DEVICE float exponential(float v) { return __expf(v); }
#else
DEVICE float exponential(float v) { return expf(v); }
#endif

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }
DEVICE unsigned thread_index() { return threadIdx.x; }
DEVICE unsigned block_index() { return blockIdx.x; }
DEVICE void block_sync() { __syncthreads(); }
DEVICE float shfl_xor(float v, int distance) { return __shfl_xor_sync(0xffffffffu, v, distance); }

// Programmatic dependent launch: this kernel reads and writes nothing before the one in front has ended; then the next may start.
DEVICE void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
