// What the kernels here need of Hopper, as inline PTX: barriers in shared memory, tensor copies, warpgroup products.
// The kernels use nothing else of the device, so that tests can put another file of the same names in this one's place.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct __align__(64) Map { u64 words[16]; };

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// A value that the compiler keeps: it would work a shared address out anew in every iteration, from a slow register.
DEVICE u32 opaque(u32 value) { asm volatile("" : "+r"(value)); return value; }
DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_arrive_at(u32 bar, u32 rank) {
  // Not `.release.cluster`, which waits for all of the warp's stores: products that have ended have nothing to publish.
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}\n"
               ::"r"(bar), "r"(rank) : "memory");
}
// A wait that cannot end stops the kernel with an error instead of the device for ever; the longest real one is far shorter.
DEVICE void barrier_wait(u32 bar, u32 parity) {
  u32 done, tries = 0;
  do {
    if (++tries == 1u << 24) __trap();
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
// The same for what other blocks of the cluster have sent.
DEVICE void barrier_wait_peers(u32 bar, u32 parity) {
  u32 done, tries = 0;
  do {
    if (++tries == 1u << 24) __trap();
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
// All threads of the cluster have come so far. Nothing that they wrote is published by it: ordering that too takes half a
// microsecond, and longer while stores are under way.
DEVICE void cluster_meet() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n" ::: "memory"); }
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory"); }
DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

// Pixels of an image in the order of the output, from (w, h, n) on, moved by the tap (right, down); channels c and following.
DEVICE void copy_pixels(u32 to, const Map* map, u32 bar, int c, int w, int h, int n, u16 right, u16 down) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
               ::"r"(to), "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(right), "h"(down) : "memory");
}
DEVICE void copy_weights(u32 to, const Map* map, u32 bar, int c, int tap, int k) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(c), "r"(tap), "r"(k) : "memory");
}
DEVICE void prefetch_map(const Map* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE void prefetch_weights(const Map* map, int c, int tap, int k) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(c), "r"(tap), "r"(k) : "memory");
}
DEVICE void copy_weights_to_all(u32 to, const Map* map, u32 bar, int c, int tap, int k, u16 ranks) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;"
               ::"r"(to), "l"(map), "r"(bar), "h"(ranks), "r"(c), "r"(tap), "r"(k) : "memory");
}

// Rows of 128 bytes in the 128-byte swizzle, eight rows an atom (layout 1, 1024 bytes from atom to atom).
DEVICE u64 operand(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
template <int COUNT> DEVICE void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void registers_fewer() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
DEVICE void wait_for_forerunner() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Four sums to a block of the cluster, counted at its barrier as they arrive; and out of this block's memory again.
DEVICE void send(u32 to, u32 rank, float a, float b, float c, float d, u32 bar) {
  asm volatile("{\n.reg .b32 p, q;\nmapa.shared::cluster.u32 p, %0, %2;\nmapa.shared::cluster.u32 q, %1, %2;\n"
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [p], {%3, %4, %5, %6}, [q];\n}\n"
               ::"r"(to), "r"(bar), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void receive(float (&v)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
}
DEVICE u32 swap_lanes(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
#if BF16
DEVICE u32 pack(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEVICE float unpack(u16 bits) { return __uint_as_float((u32)bits << 16); }
#else
DEVICE u32 pack(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEVICE float unpack(u16 bits) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits)); return r; }
#endif
#define SHARED_MEMORY extern __shared__ __align__(1024) unsigned char shared_memory[]
