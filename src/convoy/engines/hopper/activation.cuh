// An epilogue's activation, by its number. Where the result is rounded to a half type (HALF_RESULTS) and not on the host, what divides
// takes the unit's own powers and reciprocals: two instructions of it and three others for seventeen, within some units of fp32's last place.
#if defined(HALF_RESULTS) && defined(__CUDA_ARCH__)
DEVICE float sigmoid(float v) {
  float power, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + power));
  return r;
}
DEVICE float silu(float v) { return v * sigmoid(v); }
#else
DEVICE float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }
DEVICE float silu(float v) { return v / (1.f + expf(-v)); }
#endif

DEVICE float activated(float v) {
#if ACTIVATION == 1  // relu; NaN stays NaN
  return v < 0.f ? 0.f : v;
#elif ACTIVATION == 2  // relu6
  return v < 0.f ? 0.f : v > 6.f ? 6.f : v;
#elif ACTIVATION == 3  // silu
  return silu(v);
#elif ACTIVATION == 4  // hardswish
  float u = v + 3.f;
  return v * (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
#elif ACTIVATION == 5  // hardsigmoid
  float u = v + 3.f;
  return (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
#elif ACTIVATION == 6  // sigmoid
  return sigmoid(v);
#elif ACTIVATION == 7  // gelu
  return 0.5f * v * (1.f + erff(v * 0.70710678f));
#else
  return v;
#endif
}
