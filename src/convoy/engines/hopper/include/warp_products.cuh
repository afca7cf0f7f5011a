// Matrix products of a warp in registers (capability 8.0 and newer), and the asynchronous copies that feed them. The tests put a file
// of this name in front of it.
#pragma once
#include <ptx.cuh>

// Sixteen bytes to shared memory, or zeros where nothing is inside.
DEVICE void cp_async_16(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the newest COUNT groups of this thread have arrived.
template <int COUNT> DEVICE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory"); }

// 8x8 matrices of half values from rows of sixteen bytes: lanes 8m to 8m + 7 give the rows of matrix m. Each lane gets two neighbours
// of row lane / 4.
DEVICE void ldmatrix_x4(u32 (&v)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}
DEVICE void ldmatrix_x2(u32 (&v)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at) : "memory");
}

// The product of two pairs of half values, each rounded once.
template <bool BFLOAT> DEVICE u32 multiply_pair(u32 a, u32 b) {
  u32 r;
  if constexpr (BFLOAT) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// d += A · B for 16 rows, 8 columns and 16 summed values. Lane l has of A the rows l / 4 and l / 4 + 8, of B the column l / 4, each
// at 2 (l % 4) and 8 further on; of d the columns 2 (l % 4) and the next, in the same two rows.
template <bool BFLOAT> DEVICE void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (BFLOAT)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
