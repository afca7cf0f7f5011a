// The device of kernels without tensor cores: shared memory, and values in fp16 or fp32. The tests put a file of this
// name in front of it.
#pragma once

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define SHARED __shared__

// Values in memory: fp16 as bits, or fp32.
template <bool HALF> struct StoredValue { typedef float Type; };
template <> struct StoredValue<true> { typedef unsigned short Type; };

DEVICE float to_float(unsigned short bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}
DEVICE float to_float(float v) { return v; }
template <class Stored> DEVICE Stored from_float(float v);
template <> DEVICE_MEMBER unsigned short from_float<unsigned short>(float v) {
  unsigned short r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
template <> DEVICE_MEMBER float from_float<float>(float v) { return v; }
