// An epilogue's activation, by its number.
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
