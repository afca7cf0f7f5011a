// The epilogue's activation, chosen at compile time by its number (nvrtc_source.ACTIVATIONS).
#pragma once

enum Activation { NONE, RELU, RELU6, SILU, HARDSWISH, HARDSIGMOID, SIGMOID, GELU };

// The host defines FAST_DIVISION where results are rounded to a half type: approximate powers and reciprocals of the
// special function unit, five instructions instead of seventeen, a few units of fp32's last place off. On the CPU the
// exact form is used.
#if defined(FAST_DIVISION) && defined(__CUDA_ARCH__)
static __device__ __forceinline__ float sigmoid(float v) {
  float power, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + power));
  return r;
}
static __device__ __forceinline__ float silu(float v) { return v * sigmoid(v); }
#else
static __device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }
static __device__ __forceinline__ float silu(float v) { return v / (1.f + expf(-v)); }
#endif

// relu and relu6 keep NaN.
template <int ACTIVATION> static __device__ __forceinline__ float activate(float v) {
  if constexpr (ACTIVATION == RELU) {
    return v < 0.f ? 0.f : v;
  } else if constexpr (ACTIVATION == RELU6) {
    return v < 0.f ? 0.f : v > 6.f ? 6.f : v;
  } else if constexpr (ACTIVATION == SILU) {
    return silu(v);
  } else if constexpr (ACTIVATION == HARDSWISH) {
    float u = v + 3.f;
    return v * (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
  } else if constexpr (ACTIVATION == HARDSIGMOID) {
    float u = v + 3.f;
    return (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
  } else if constexpr (ACTIVATION == SIGMOID) {
    return sigmoid(v);
  } else if constexpr (ACTIVATION == GELU) {
    return 0.5f * v * (1.f + erff(v * 0.70710678f));
  } else {
    return v;
  }
}
