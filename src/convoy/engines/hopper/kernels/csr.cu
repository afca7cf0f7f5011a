// Direct convolution over weights in compressed sparse rows, after Escoin (Chen, "Escoin: Efficient Sparse
// Convolutional Neural Network Inference on GPUs", arXiv 1802.10280): a filter is a row, an entry a value and the
// place of its input in the padded image.
//
//   x --- pad() ---> planes with a border of zeros (workspace)
//
//   csr(): a block is one filter by THREADS * PIXELS pixels
//
//     entries of the filter:  [offset, value] [offset, value] ...     THREADS at a time: all threads copy them to shared memory,
//                                  |                                  __syncthreads(), then every thread reads all of them
//     thread t:  sum[i] += value * planes[base[i] + offset]           i: its PIXELS pixels
//
// Parameters: csr_config.cuh.
#include <activation.cuh>
#include <csr_config.cuh>
#include <plain_device.cuh>

struct Sizes {
  int pixels, k, q, pq, c, h, w, pad_h, pad_w, padded_h, padded_w, stride_h, stride_w, planes;
};
struct Entry { int offset; float value; };

typedef StoredValue<HALF>::Type Value;

// The images with a border of zeros, so that no entry has to test where it reads.
extern "C" __global__ void __launch_bounds__(THREADS)
    pad(const Value* x, Value* planes, const __grid_constant__ Sizes sizes) {
  int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= sizes.planes) return;
  int column = at % sizes.padded_w - sizes.pad_w, rest = at / sizes.padded_w;
  int row = rest % sizes.padded_h - sizes.pad_h, plane = rest / sizes.padded_h;
  bool inside = row >= 0 && row < sizes.h && column >= 0 && column < sizes.w;
  planes[at] = inside ? x[((long long)plane * sizes.h + row) * sizes.w + column] : (Value)0;
}

// The blocks of one run of pixels follow each other: their inputs are in the caches.
extern "C" __global__ void __launch_bounds__(THREADS)
csr(const Value* planes, const int* starts, const Entry* entries, const Value* bias, const Value* residual, Value* y,
    const __grid_constant__ Sizes sizes) {
  SHARED Entry staged[THREADS];
  int filter = blockIdx.x % sizes.k, thread = threadIdx.x,
      first_pixel = blockIdx.x / sizes.k * (THREADS * PIXELS) + thread;
  int base[PIXELS];
  float sum[PIXELS];
#pragma unroll
  for (int i = 0; i < PIXELS; i++) {
    int pixel = first_pixel + i * THREADS, image = pixel / sizes.pq, rest = pixel % sizes.pq;
    int place = (image * sizes.c * sizes.padded_h + rest / sizes.q * sizes.stride_h) * sizes.padded_w +
                rest % sizes.q * sizes.stride_w;
    base[i] = pixel < sizes.pixels ? place : 0;
    sum[i] = 0.f;
  }
  int last = starts[filter + 1];
  for (int at = starts[filter]; at < last; at += THREADS) {
    __syncthreads();
    if (at + thread < last) staged[thread] = entries[at + thread];
    __syncthreads();
    int count = last - at < THREADS ? last - at : THREADS;
#pragma unroll 4
    for (int e = 0; e < count; e++) {
      Entry entry = staged[e];
#pragma unroll
      for (int i = 0; i < PIXELS; i++) sum[i] = fmaf(entry.value, to_float(planes[base[i] + entry.offset]), sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < PIXELS; i++) {
    int pixel = first_pixel + i * THREADS;
    if (pixel >= sizes.pixels) continue;
    long long place = ((long long)(pixel / sizes.pq) * sizes.k + filter) * sizes.pq + pixel % sizes.pq;
    float v = sum[i];
    if constexpr (HAS_BIAS) v += to_float(bias[filter]);
    if constexpr (HAS_RESIDUAL) v += to_float(residual[place]);
    y[place] = from_float<Value>(activate<ACTIVATION>(v));
  }
}
