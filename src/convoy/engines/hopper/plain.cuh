// What kernels without tensor cores need of a device: shared memory and half values.
#define DEVICE static __device__ __forceinline__
#define SHARED __shared__
#if HALF
DEVICE float wide(unsigned short bits) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits)); return r; }
DEVICE unsigned short narrow(float v) { unsigned short r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
#else
DEVICE float wide(float v) { return v; }
DEVICE float narrow(float v) { return v; }
#endif
