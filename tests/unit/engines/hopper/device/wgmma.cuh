// include/wgmma.cuh on the emulated device. A descriptor's layout is in its upper bits, as on the device: 0 is no swizzle.
#pragma once
#include <ptx.cuh>

enum : u64 { SWIZZLE_128 = 1ull << 62 };
DEVICE void wgmma_fence() { together(); }
DEVICE void wgmma_commit_group() { together(); }
template <int LEFT> DEVICE void wgmma_wait_group() { together(); }
template <int COUNT> DEVICE void fence_operand(float (&)[COUNT]) {}
DEVICE u64 smem_desc_sw128(u32 address) { return address | SWIZZLE_128; }
DEVICE u32 smem_desc_low(u32 address) { return address / 16; }
DEVICE u64 smem_desc_sw128_of(u32 low) { return low * 16 | SWIZZLE_128; }
DEVICE u64 smem_desc_sw64_of(u32 low) { return low * 16; }
DEVICE u32 smem_desc_low_transposed(u32 address, u32 across) { return (address & 0x3ffff) >> 4 | (across >> 4) << 16; }
DEVICE u64 smem_desc_transposed_of(u32 word) { return (u64)word | (64ull << 32) | (1ull << 62); }
DEVICE u64 smem_desc_no_swizzle(u32 address, u32 across, u32 down) {
  if (address % 16 || across % 16 || down % 16) faults++;
  return (u64)(address >> 4) | (u64)(across >> 4) << 16 | (u64)(down >> 4) << 32;
}
