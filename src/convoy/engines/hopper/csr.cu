// Direct convolution over weights in compressed sparse rows, after Escoin (Chen, "Escoin: Efficient Sparse Convolutional Neural Network
// Inference on GPUs", arXiv 1802.10280): a filter is a row, an entry a value and the place of its input in the padded image.
//
// Given by the host: HALF (storage; sums are fp32), THREADS, PIXELS (of a thread), BIAS, RESIDUAL, ACTIVATION (a number).

struct Sizes {
  int pixels, k, q, pq, c, h, w, pad_h, pad_w, padded_h, padded_w, stride_h, stride_w, planes;
};
struct Entry { int offset; float value; };

#if HALF
typedef unsigned short Value;
#else
typedef float Value;
#endif

// The images with their borders: zeros all round, so that no entry has to ask where it reads.
extern "C" __global__ void __launch_bounds__(THREADS) pad(const Value* x, Value* planes, const __grid_constant__ Sizes z) {
  int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= z.planes) return;
  int column = at % z.padded_w - z.pad_w, rest = at / z.padded_w;
  int row = rest % z.padded_h - z.pad_h, plane = rest / z.padded_h;
  bool inside = row >= 0 && row < z.h && column >= 0 && column < z.w;
  planes[at] = inside ? x[((long long)plane * z.h + row) * z.w + column] : (Value)0;
}

// A block: one filter by THREADS * PIXELS pixels. Blocks of one run of pixels follow each other: their inputs are in the caches.
extern "C" __global__ void __launch_bounds__(THREADS)
csr(const Value* planes, const int* starts, const Entry* entries, const Value* bias, const Value* residual, Value* y, const __grid_constant__ Sizes z) {
  SHARED Entry staged[THREADS];
  int filter = blockIdx.x % z.k, thread = threadIdx.x, first_pixel = blockIdx.x / z.k * (THREADS * PIXELS) + thread;
  int base[PIXELS];
  float sum[PIXELS];
#pragma unroll
  for (int i = 0; i < PIXELS; i++) {
    int pixel = first_pixel + i * THREADS, image = pixel / z.pq, rest = pixel % z.pq;
    int place = (image * z.c * z.padded_h + rest / z.q * z.stride_h) * z.padded_w + rest % z.q * z.stride_w;
    base[i] = pixel < z.pixels ? place : 0;
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
      for (int i = 0; i < PIXELS; i++) sum[i] = fmaf(entry.value, wide(planes[base[i] + entry.offset]), sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < PIXELS; i++) {
    int pixel = first_pixel + i * THREADS;
    if (pixel >= z.pixels) continue;
    long long place = ((long long)(pixel / z.pq) * z.k + filter) * z.pq + pixel % z.pq;
    float v = sum[i];
#if BIAS
    v += wide(bias[filter]);
#endif
#if RESIDUAL
    v += wide(residual[place]);
#endif
    y[place] = narrow(activated(v));
  }
}
