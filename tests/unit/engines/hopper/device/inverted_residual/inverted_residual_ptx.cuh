// include/inverted_residual/inverted_residual_ptx.cuh on the emulated device.
#pragma once
#include <activation.cuh>
#include <warp_products.cuh>

DEVICE void st_shared_u32(u32 to, u32 v) {
  if (to % 4 || to + 4 > here->memory.size()) { faults++; return; }
  std::memcpy(here->memory.data() + to, &v, 4);
}
DEVICE u32 ballot(bool value) {
  u32 bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= (from_lane(value, lane) & 1) << lane;
  return bits;
}
DEVICE void cluster_sync() { cluster->all->meet(); }
DEVICE void ld_shared_cluster_v4(float (&v)[4], u32 from, u32 rank) {
  Block* peer = cluster->blocks[rank].get();
  if (!peer->running || from % 16 || from + 16 > peer->memory.size()) { faults++; return; }
  std::memcpy(v, peer->memory.data() + from, 16);
}
template <bool BFLOAT> DEVICE void mma_16x8x8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  const u32 a[4] = {a0, a1, 0, 0};
  mma_16x8x16<BFLOAT>(d, a, b, 0);
}
template <bool BFLOAT, int ACTIVATION> DEVICE u32 activate_pair(float low, float high) {
  return pack_pair<BFLOAT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
}
