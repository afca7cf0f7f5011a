// Squeeze-and-excitation, NHWC: y = x · outer(W2 · inner(W1 · mean(x) + bias) + shift), and what follows, in two launches.
//
//   squeeze   A block has BLOCK_C channels of a part of an image's pixels. It adds the pixels, and multiplies the sums by
//             its columns of W1 at once: the first layer is linear in the mean. Its HIDDEN sums are one part.
//   excite    A block adds all parts of its image in one order, so equal inputs give equal bits, makes the gate of its
//             channels, and multiplies its pixels by it.
//
//      block (image, row, column)      x: [image][pixel][channel]
//        LANES threads  --->  channels, 16 bytes each
//        LINES of them  --->  pixels
//
// Weights are read before the wait for the kernel in front: nobody writes them. Parameters: squeeze_excitation_config.cuh.
#include <gates/squeeze.cuh>

// Second layer: SHARES threads share a channel, each with every SHARES-th hidden channel.
enum : int {
  SHARES = THREADS / BLOCK_C,
  SECOND = (HIDDEN + SHARES - 1) / SHARES,
  HOLDS_SECOND = SECOND <= MOST_HELD,
};

extern "C" __global__ void __launch_bounds__(THREADS)
    excite(const uint4* __restrict__ x, const float* __restrict__ bias, const Weight* __restrict__ weight,
           const float* __restrict__ shift, const float* __restrict__ parts, const uint4* __restrict__ residual,
           uint4* __restrict__ y) {
  SHARED_MEMORY;
  const Place place;
  const u32 added = shared_address(shared_memory), hidden = added + Adders<THREADS>::COUNT * HIDDEN * 8, shares = hidden + HIDDEN * 8,
            gates = shares + THREADS * 8;
  const int channel = threadIdx.x % BLOCK_C, share = threadIdx.x / BLOCK_C;
  float held[HOLDS_SECOND ? SECOND : 1];
  if constexpr (HOLDS_SECOND) {
#pragma unroll
    for (int i = 0; i < SECOND; i++) held[i] = second_factor(weight, share + i * SHARES, place.column * BLOCK_C + channel);
  }
  follow();
  uint4 ahead = {};
  if (place.there && place.begin() < place.end()) ahead = x[place.at(place.begin())];
  add_parts<THREADS>(parts, bias, place.image, added, hidden);
  float sum = 0.f;
  if constexpr (HOLDS_SECOND) {
#pragma unroll
    for (int i = 0; i < SECOND; i++) {
      int h = share + i * SHARES;
      if (h < HIDDEN) sum += held[i] * word_at(hidden + h * 8);
    }
  } else {
#pragma unroll 4
    for (int h = share; h < HIDDEN; h += SHARES)
      sum += second_factor(weight, h, place.column * BLOCK_C + channel) * word_at(hidden + h * 8);
  }
  put(shares + threadIdx.x * 8, sum, 0.f);
  __syncthreads();
  if (threadIdx.x < BLOCK_C) {
    int c = place.column * BLOCK_C + threadIdx.x;
    float gate = HAS_SHIFT && c < CHANNELS ? shift[c] : 0.f;
    for (int s = 0; s < SHARES; s++) gate += word_at(shares + (s * BLOCK_C + threadIdx.x) * 8);
    put(gates + threadIdx.x * 8, activate<OUTER>(gate), 0.f);
  }
  __syncthreads();
  if (!place.there) return;
  float gate[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; i++) gate[i] = word_at(gates + (place.lane * VECTOR + i) * 8);
#pragma unroll 2
  for (int pixel = place.begin(); pixel < place.end(); pixel += LINES) {
    float v[VECTOR];
    to_floats(v, pixel == place.begin() ? ahead : x[place.at(pixel)]);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] *= gate[i];
    if constexpr (HAS_RESIDUAL) {
      float more[VECTOR];
      to_floats(more, residual[place.at(pixel)]);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) v[i] += more[i];
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = RELU_BEHIND ? activate<RELU>(v[i]) : v[i];
    y[place.at(pixel)] = from_floats(v);
  }
}
