// Instructions that inverted_residual.cu uses besides those of warp_products.cuh. The tests put a file of this name in front of it.
#pragma once
#include <activation.cuh>
#include <warp_products.cuh>

DEVICE void st_shared_u32(u32 to, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }

// A bit for each lane of the warp.
DEVICE u32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

// All threads of the cluster meet; what they wrote to shared memory before is seen by all behind it.
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory"); }
DEVICE void ld_shared_cluster_v4(float (&v)[4], u32 from, u32 rank) {
  asm volatile("{\n.reg .b32 p;\nmapa.shared::cluster.u32 p, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [p];\n}\n"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from), "r"(rank) : "memory");
}

// d += A · B for 16 rows, 8 columns and 8 summed values, with the lanes of `mma_16x8x16`.
template <bool BFLOAT> DEVICE void mma_16x8x8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  if constexpr (BFLOAT)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
  else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

// Two values behind their activation, rounded once. Zero and six are half values, so rounding first gives the same bits. NaN stays NaN.
template <bool BFLOAT, int ACTIVATION> DEVICE u32 activate_pair(float low, float high) {
  if constexpr (ACTIVATION == RELU || ACTIVATION == RELU6) {
    u32 r;
    if constexpr (BFLOAT) asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    if constexpr (ACTIVATION == RELU6) {
      if constexpr (BFLOAT) asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(r) : "r"(0x40c040c0u));
      else asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0x46004600u));
    }
    return r;
  } else {
    return pack_pair<BFLOAT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
  }
}
