// One wrapper for each PTX instruction that the kernels use, named after it: mbarrier, cluster, griddepcontrol,
// setmaxnreg, shared memory, shuffles and conversions. Tensor copies are in tma.cuh, matrix products in wgmma.cuh. A
// kernel touches the device through these names alone: the tests put files of the same names in front of them and run
// the kernels on the CPU.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define SHARED_MEMORY extern __shared__ __align__(1024) unsigned char shared_memory[]

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// A value that the compiler must keep in a register. Without it, ptxas computes a shared address anew in every
// iteration, from a slow special register.
DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- mbarrier: counts arrivals of threads and bytes of asynchronous copies; a phase ends when both have come.
DEVICE void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// At the same barrier of another block of the cluster. Not `.release.cluster`, which waits for all stores of the warp:
// products that have ended publish nothing.
DEVICE void mbarrier_arrive_cluster(u32 bar, u32 rank) {
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}\n"
               ::"r"(bar), "r"(rank) : "memory");
}
// Waits until the phase of this parity has ended. After 2^24 tries the kernel stops with an error, instead of hanging
// the device; the longest real wait is far shorter.
DEVICE void mbarrier_wait(u32 bar, u32 parity) {
  u32 done, tries = 0;
  do {
    if (++tries == 1u << 24) __trap();
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
// The same for writes of other blocks of the cluster.
DEVICE void mbarrier_wait_acquire_cluster(u32 bar, u32 parity) {
  u32 done, tries = 0;
  do {
    if (++tries == 1u << 24) __trap();
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
// For a phase that has ended already in most cases: the first try is not counted.
DEVICE void mbarrier_try_then_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  if (!done) mbarrier_wait(bar, parity);
}

// ---- Thread-block clusters. `relaxed`: the barrier publishes no writes. A release costs half a microsecond, and more while stores are
// under way.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
DEVICE void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n" ::: "memory");
}
DEVICE u32 cluster_ctarank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Four floats to another block's shared memory; its mbarrier counts the sixteen bytes as they arrive.
DEVICE void st_async_v4(u32 to, u32 rank, float a, float b, float c, float d, u32 bar) {
  asm volatile("{\n.reg .b32 p, q;\nmapa.shared::cluster.u32 p, %0, %2;\nmapa.shared::cluster.u32 q, %1, %2;\n"
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [p], {%3, %4, %5, %6}, [q];\n}\n"
               ::"r"(to), "r"(bar), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// ---- Named barriers. `group` counts warpgroups that multiply; barrier 4 is that of all of them.
DEVICE void warpgroup_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
template <int WARPGROUPS>
DEVICE void consumers_sync() {
  asm volatile("bar.sync 4, %0;" ::"n"(128 * WARPGROUPS) : "memory");
}

// ---- Programmatic dependent launch: wait for the kernel in front; let the next kernel's blocks start.
DEVICE void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void griddep_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- Registers of a warpgroup.
template <int COUNT> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- Shared memory.
DEVICE u32 ld_shared_u32(u32 at) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
  return r;
}
DEVICE void ld_shared_v2(float (&v)[2], u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(from) : "memory");
}
DEVICE uint4 ld_shared_v4(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
DEVICE void ld_shared_v4(float (&v)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
}
DEVICE void st_shared_v2(u32 to, u32 a, u32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
DEVICE void st_shared_v4(u32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Writes of this thread to shared memory become visible to tensor copies and products that start after a barrier.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 8x8 matrices of half values to or from rows of sixteen bytes, transposed: lanes 8m to 8m + 7 give the rows of matrix
// m. Each lane has two neighbours of row lane / 4.
DEVICE void stmatrix_x4_trans(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void stmatrix_x2_trans(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(v[0]), "r"(v[1])
               : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&v)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}
DEVICE void ldmatrix_x2_trans(u32 (&v)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(v[0]), "=r"(v[1]) : "r"(at) : "memory");
}
// An 8x8 matrix of half values in registers, transposed.
DEVICE u32 movmatrix_trans(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// ---- Lanes of a warp.
DEVICE u32 shfl_xor(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE u32 shfl(u32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// A value that all lanes of a warp share: the compiler keeps it in a uniform register.
DEVICE u32 warp_uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

// ---- Values. A pair is two half values in one word.
template <bool BFLOAT> DEVICE u32 pack_pair(float low, float high) {
  u32 r;
  if constexpr (BFLOAT) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <bool BFLOAT> DEVICE float half_to_float(u16 bits) {
  if constexpr (BFLOAT) return __uint_as_float((u32)bits << 16);
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}
// The larger one, element by element; NaN is larger than every number.
template <bool BFLOAT> DEVICE u32 max_nan_pair(u32 a, u32 b) {
  u32 r;
  if constexpr (BFLOAT) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
DEVICE u32 float_as_u32(float v) { return __float_as_uint(v); }
DEVICE float u32_as_float(u32 bits) { return __uint_as_float(bits); }
// The bits of an fp32 value, rounded to the nearest value that TF32 products take without cutting it.
DEVICE u32 round_to_tf32(u32 bits) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(bits)));
  return r;
}
