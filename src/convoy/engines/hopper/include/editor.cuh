// For editors: CUDA's names for clang without a CUDA toolkit. `compile_commands.json` (bench/compile_commands.py) puts
// it in front of every kernel; NVRTC never sees it.
#pragma once

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __grid_constant__ __attribute__((grid_constant))
#define __align__(n) __attribute__((aligned(n)))
typedef unsigned long size_t;
struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
extern const __device__ uint3 threadIdx, blockIdx, blockDim, gridDim;
__device__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w);
__device__ float2 make_float2(float x, float y);
__device__ void __syncthreads();
__device__ void __trap();
__device__ unsigned __shfl_sync(unsigned mask, unsigned value, int lane);
__device__ unsigned __ballot_sync(unsigned mask, int value);
__device__ unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes);
__device__ size_t __cvta_generic_to_shared(const void* p);
__device__ float __uint_as_float(unsigned bits);
__device__ unsigned __float_as_uint(float v);
__device__ float expf(float v);
__device__ float erff(float v);
__device__ float fmaf(float a, float b, float c);
