// The functions of elementwise operators, in fp32, as PyTorch defines them. Comparisons give 0 and 1. All keep NaN.
#pragma once

DEVICE float op_add(float a, float b) { return a + b; }
DEVICE float op_sub(float a, float b) { return a - b; }
DEVICE float op_mul(float a, float b) { return a * b; }
DEVICE float op_div(float a, float b) { return a / b; }
DEVICE float op_maximum(float a, float b) { return a != a || a > b ? a : b; }
DEVICE float op_minimum(float a, float b) { return a != a || a < b ? a : b; }
DEVICE float op_gt(float a, float b) { return a > b; }
DEVICE float op_lt(float a, float b) { return a < b; }
DEVICE float op_ge(float a, float b) { return a >= b; }
DEVICE float op_le(float a, float b) { return a <= b; }
DEVICE float op_eq(float a, float b) { return a == b; }
DEVICE float op_ne(float a, float b) { return a != b; }
DEVICE float op_logical_and(float a, float b) { return a != 0.f && b != 0.f; }
DEVICE float op_logical_or(float a, float b) { return a != 0.f || b != 0.f; }
DEVICE float op_logical_not(float v) { return v == 0.f; }
DEVICE float op_where(float condition, float a, float b) { return condition != 0.f ? a : b; }

DEVICE float op_at_least(float v, float low) { return v < low ? low : v; }
DEVICE float op_at_most(float v, float high) { return v > high ? high : v; }
DEVICE float op_relu(float v) { return v < 0.f ? 0.f : v; }
DEVICE float op_hardtanh(float v, float low, float high) { return op_at_most(op_at_least(v, low), high); }
DEVICE float op_relu6(float v) { return op_hardtanh(v, 0.f, 6.f); }
DEVICE float op_hardsigmoid(float v) { return op_relu6(v + 3.f) / 6.f; }
DEVICE float op_hardswish(float v) { return v * op_relu6(v + 3.f) / 6.f; }
DEVICE float op_leaky_relu(float v, float slope) { return v > 0.f ? v : v * slope; }
DEVICE float op_prelu(float v, float slope) { return v > 0.f ? v : v * slope; }
DEVICE float op_threshold(float v, float limit, float value) { return v <= limit ? value : v; }

DEVICE float op_exp(float v) { return exponential(v); }
DEVICE float op_expm1(float v) { return expm1f(v); }
DEVICE float op_log(float v) { return logf(v); }
DEVICE float op_log1p(float v) { return log1pf(v); }
DEVICE float op_tanh(float v) { return tanhf(v); }
DEVICE float op_erf(float v) { return erff(v); }
DEVICE float op_sqrt(float v) { return sqrtf(v); }
DEVICE float op_rsqrt(float v) { return 1.f / sqrtf(v); }
DEVICE float op_reciprocal(float v) { return 1.f / v; }
DEVICE float op_pow(float v, float exponent) { return powf(v, exponent); }
DEVICE float op_square(float v) { return v * v; }
DEVICE float op_cube(float v) { return v * v * v; }
DEVICE float op_abs(float v) { return fabsf(v); }
DEVICE float op_neg(float v) { return -v; }

DEVICE float op_sigmoid(float v) { return 1.f / (1.f + exponential(-v)); }
DEVICE float op_silu(float v) { return v / (1.f + exponential(-v)); }
DEVICE float op_gelu(float v) { return 0.5f * v * (1.f + erff(v * 0.70710678118654752f)); }
DEVICE float op_gelu_tanh(float v) {
  return 0.5f * v * (1.f + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)));
}
DEVICE float op_softplus(float v, float beta, float threshold) {
  return v * beta > threshold ? v : log1pf(exponential(v * beta)) / beta;
}
DEVICE float op_mish(float v) { return v * tanhf(v > 20.f ? v : log1pf(exponential(v))); }
DEVICE float op_elu(float v, float alpha, float scale, float input_scale) {
  return v > 0.f ? v * scale : v <= 0.f ? expm1f(v * input_scale) * alpha * scale : v;
}

DEVICE float op_threshold_backward(float dy, float x, float limit) { return x <= limit ? 0.f : dy; }
DEVICE float op_hardtanh_backward(float dy, float x, float low, float high) { return x <= low || x >= high ? 0.f : dy; }
DEVICE float op_leaky_relu_backward(float dy, float x, float slope) { return x > 0.f ? dy : dy * slope; }
DEVICE float op_hardsigmoid_backward(float dy, float x) { return x > -3.f && x < 3.f ? dy / 6.f : 0.f; }
DEVICE float op_hardswish_backward(float dy, float x) {
  return x < -3.f ? 0.f : x <= 3.f ? dy * (x / 3.f + 0.5f) : dy;
}
DEVICE float op_silu_backward(float dy, float x) {
  const float s = op_sigmoid(x);
  return dy * s * (1.f + x * (1.f - s));
}
DEVICE float op_sigmoid_backward(float dy, float y) { return dy * (1.f - y) * y; }
DEVICE float op_tanh_backward(float dy, float y) { return dy * (1.f - y * y); }
DEVICE float op_gelu_backward(float dy, float x) {
  const float below = 0.5f * (1.f + erff(x * 0.70710678118654752f));
  return dy * (below + x * 0.39894228040143268f * exponential(-0.5f * x * x));
}

DEVICE float between(float a, float b, float share) { return a * (1.f - share) + b * share; }

DEVICE float op_round_fp16(float v) { return to_float(from_float<Half>(v)); }
DEVICE float op_round_bf16(float v) { return to_float(from_float<BFloat>(v)); }

// ---- Vectors in memory, and reductions over the threads of a block.

template <class T, int WIDTH> struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Vector { T value[WIDTH]; };

template <class T, int WIDTH> DEVICE void load(float (&v)[WIDTH], const T* from) {
  const Vector<T, WIDTH> vector = *reinterpret_cast<const Vector<T, WIDTH>*>(from);
  UNROLL for (int lane = 0; lane < WIDTH; ++lane) v[lane] = to_float(vector.value[lane]);
}
template <class T, int WIDTH> DEVICE void store(T* to, const float (&v)[WIDTH]) {
  Vector<T, WIDTH> vector;
  UNROLL for (int lane = 0; lane < WIDTH; ++lane) vector.value[lane] = from_float<T>(v[lane]);
  *reinterpret_cast<Vector<T, WIDTH>*>(to) = vector;
}

struct Sum { DEVICE float of(float a, float b) { return a + b; } };
struct Max { DEVICE float of(float a, float b) { return op_maximum(a, b); } };

// Of the COUNT threads STRIDE apart, in an order that does not depend on timing; each gets the results. All of a block's
// threads call it. More than a warp's threads are the whole block's, STRIDE * COUNT: they meet in `shared`.
template <class Operation, int STRIDE, int COUNT, int WIDTH> DEVICE void reduce(float (&v)[WIDTH], float* shared) {
  UNROLL for (int distance = STRIDE; distance < 32 && distance < STRIDE * COUNT; distance *= 2)
    UNROLL for (int lane = 0; lane < WIDTH; ++lane) v[lane] = Operation::of(v[lane], shfl_xor(v[lane], distance));
  if constexpr (STRIDE * COUNT > 32) {
    const int thread = thread_index(), column = thread % STRIDE;
    block_sync();  // what was there before has been read
    if (thread % 32 < STRIDE)
      UNROLL for (int lane = 0; lane < WIDTH; ++lane) shared[(thread / 32 * WIDTH + lane) * STRIDE + column] = v[lane];
    block_sync();
    UNROLL for (int lane = 0; lane < WIDTH; ++lane) {
      v[lane] = shared[lane * STRIDE + column];
      for (int warp = 1; warp < STRIDE * COUNT / 32; ++warp)
        v[lane] = Operation::of(v[lane], shared[(warp * WIDTH + lane) * STRIDE + column]);
    }
  }
}
template <class Operation, int STRIDE, int COUNT> DEVICE void reduce(float& v, float* shared) {
  float one[1] = {v};
  reduce<Operation, STRIDE, COUNT>(one, shared);
  v = one[0];
}
