// Kernels whose rows are filters and whose columns are pixels: the types of their values, and how their sums begin.
#pragma once
#include <activation.cuh>
#include <igemm/igemm_swap_ab_config.cuh>
#include <ptx.cuh>

#if FP32_RESULTS
typedef float Value;
DEVICE float value_to_float(Value v) { return v; }
#else
typedef u16 Value;
DEVICE float value_to_float(Value v) { return half_to_float<BFLOAT>(v); }
#endif

enum : int {
  GROUPS = TILE_N / 8,  // of eight pixels
  PARTS = WARPGROUP_M / 64,  // groups of 64 filters of a warpgroup
};

// Sums begin with the bias: it is loaded before anything is stored, and needs no registers of its own.
DEVICE void begin(float (&d)[PARTS][TILE_N / 2], int filter0, int lane, int k, const Value* __restrict__ bias) {
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    float added[2] = {0.f, 0.f};
    if constexpr (HAS_BIAS) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int filter = filter0 + part * 64 + half * 8 + lane / 4;
        if (filter < k) added[half] = value_to_float(bias[filter]);
      }
    }
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) d[part][i] = added[i / 2 % 2];
  }
}
