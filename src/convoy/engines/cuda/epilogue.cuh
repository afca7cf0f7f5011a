// What follows the products: the activation, and four lanes that exchange words so that each stores sixteen bytes at once.
DEVICE float activated(float v) {
#if ACTIVATION == 1  // relu; NaN stays NaN
  return v < 0.f ? 0.f : v;
#elif ACTIVATION == 2  // relu6
  return v < 0.f ? 0.f : v > 6.f ? 6.f : v;
#elif ACTIVATION == 3  // silu
  return v / (1.f + expf(-v));
#elif ACTIVATION == 4  // hardswish
  float u = v + 3.f;
  return v * (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
#elif ACTIVATION == 5  // hardsigmoid
  float u = v + 3.f;
  return (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
#elif ACTIVATION == 6  // sigmoid
  return 1.f / (1.f + expf(-v));
#elif ACTIVATION == 7  // gelu
  return 0.5f * v * (1.f + erff(v * 0.70710678f));
#else
  return v;
#endif
}

// Four lanes exchange four words each: word i of lane l becomes word l of lane i.
DEVICE void transpose(u32 (&v)[4], int lane) {
  bool odd = lane & 1, high = lane & 2;
  u32 a = swap_lanes(odd ? v[0] : v[1], 1), b = swap_lanes(odd ? v[2] : v[3], 1);
  if (odd) { v[0] = a; v[2] = b; } else { v[1] = a; v[3] = b; }
  a = swap_lanes(high ? v[0] : v[2], 2);
  b = swap_lanes(high ? v[1] : v[3], 2);
  if (high) { v[0] = a; v[1] = b; } else { v[2] = a; v[3] = b; }
}
