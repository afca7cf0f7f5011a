// Hopper's warpgroup products (wgmma): fences, and descriptors of operands in shared memory (PTX ISA, "asynchronous
// warpgroup level matrix operations"). The products themselves are in wgmma_instructions.cuh.
#pragma once
#include <ptx.cuh>

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Sums may be read from here on. Without this the compiler may move a read in front of the wait for their products.
template <int COUNT> DEVICE void fence_operand(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- Descriptors. All offsets are in units of sixteen bytes; the swizzle follows from the address alone, so that an operand may begin
// at any row.
//
// Rows of 128 bytes in the 128-byte swizzle (layout 1): eight rows are an atom, 1024 bytes from atom to atom.
DEVICE u64 smem_desc_sw128(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
// The low word of such a descriptor, which a loop can count up, and the descriptor of a low word.
DEVICE u32 smem_desc_low(u32 address) { return (address & 0x3FFFF) >> 4 | 1u << 16; }
DEVICE u64 smem_desc_sw128_of(u32 low) { return (u64)low | (64ull << 32) | (1ull << 62); }
// Rows of 64 bytes in the 64-byte swizzle (layout 2), 512 bytes from atom to atom: compressed 2:4 weights.
DEVICE u64 smem_desc_sw64_of(u32 low) { return (u64)low | (32ull << 32) | (2ull << 62); }
// A transposed operand (MN-major) in the 128-byte swizzle: 64 values of its rows or columns in each row of shared
// memory, and a row for each value of the summed dimension. `across` bytes lead from these 64 values to the next 64
// (the leading offset).
DEVICE u32 smem_desc_low_transposed(u32 address, u32 across) { return (address & 0x3FFFF) >> 4 | (across >> 4) << 16; }
DEVICE u64 smem_desc_transposed_of(u32 low) { return (u64)low | (64ull << 32) | (1ull << 62); }
// No swizzle: eight rows of sixteen bytes follow each other. `across` bytes lead to the next sixteen bytes of these
// rows, `down` bytes to the next eight rows.
DEVICE u64 smem_desc_no_swizzle(u32 address, u32 across, u32 down) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(across >> 4) << 16 | (u64)(down >> 4) << 32;
}
