// A 4x4 transpose across four lanes.
#pragma once
#include <ptx.cuh>

// Word i of lane l becomes word l of lane i. `lane` counts within the four.
DEVICE void transpose_four_lanes(u32 (&v)[4], int lane) {
  bool odd = lane & 1, high = lane & 2;
  u32 a = shfl_xor(odd ? v[0] : v[1], 1), b = shfl_xor(odd ? v[2] : v[3], 1);
  if (odd) { v[0] = a; v[2] = b; } else { v[1] = a; v[3] = b; }
  a = shfl_xor(high ? v[0] : v[2], 2);
  b = shfl_xor(high ? v[1] : v[3], 2);
  if (high) { v[0] = a; v[1] = b; } else { v[2] = a; v[3] = b; }
}
