// What kernels whose rows are filters need of Hopper beside hopper.cuh: copies to every block of a cluster, plain and gathered copies,
// sparse operands, transposition. Tests put another file of the same names in its place.
DEVICE void copy_pixels_to_all(u32 to, const Map* map, u32 bar, int c, int w, int h, int n, u16 right, u16 down, u16 ranks) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;"
               ::"r"(to), "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(right), "h"(down), "h"(ranks) : "memory");
}
DEVICE void copy_bytes(u32 to, const unsigned char* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void prefetch_bytes(const unsigned char* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DEVICE u32 shared_word(u32 at) { u32 r; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(at) : "memory"); return r; }

// The two halves of a meeting of a cluster, with work between them.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Where an operand begins, as its descriptor has it: in steps of sixteen bytes, so that a loop may count it up. Then the descriptors
// of rows of 64 bytes in the 64-byte swizzle, eight rows an atom (layout 2, 512 bytes from atom to atom), and of rows of 128 bytes as in
// `operand`. A row of the latter may be any one: what counts for the swizzle is the address alone.
DEVICE u32 operand_word(u32 address) { return (address & 0x3FFFF) >> 4 | 1u << 16; }
DEVICE u64 sparse_operand(u32 word) { return (u64)word | (32ull << 32) | (2ull << 62); }
DEVICE u64 dense_operand(u32 word) { return (u64)word | (64ull << 32) | (1ull << 62); }
// Rows of 128 bytes in the same swizzle that a product turns over: 64 values of its rows or columns in each row, and a row for each
// value that is summed over. So many bytes from these 64 to the next (the leading offset), and eight rows of 1024 bytes from one
// atom to the next (the stride): PTX ISA, canonical layouts of wgmma, MN-major.
DEVICE u32 turned_word(u32 address, u32 across) { return (address & 0x3FFFF) >> 4 | (across >> 4) << 16; }
DEVICE u64 turned_operand(u32 word) { return (u64)word | (64ull << 32) | (1ull << 62); }
// What products wrote may be read from here on: the compiler would read it before they have ended.
template <int COUNT> DEVICE void keep(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Without a swizzle: eight rows of sixteen bytes follow each other; so many bytes from there to the next sixteen of these rows, and
// to the next eight rows.
DEVICE u64 plain_operand(u32 address, u32 across, u32 down) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(across >> 4) << 16 | (u64)(down >> 4) << 32;
}
DEVICE void store_eight_bytes(u32 to, u32 a, u32 b) { asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory"); }
DEVICE void store_sixteen_bytes(u32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint4 load_sixteen_bytes(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
DEVICE u32 lane_value(u32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// Of two pairs of half values, one by one; NaN is over every number.
DEVICE u32 largest(u32 a, u32 b) {
  u32 r;
#if BF16
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#endif
  return r;
}
DEVICE float largest(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE u32 float_as_word(float v) { return __float_as_uint(v); }
DEVICE float word_as_float(u32 bits) { return __uint_as_float(bits); }
// fp32's bits to the nearest value that products in TF32 take as it is.
DEVICE u32 rounded_to_tf32(u32 bits) { u32 r; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(bits))); return r; }
// A value that all lanes of a warp have: kept once for them.
DEVICE u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }
// For what is there more often than not: what `barrier_wait` counts is not counted for the first try.
DEVICE void barrier_wait_soon(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  if (!done) barrier_wait(bar, parity);
}

// Sixteen bytes, or zeros where they lie outside. Who has waited for his gathers makes them seen by products.
DEVICE void gather(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void gathers_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void gathers_wait() { asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(LEFT) : "memory"); }

// Boxes of a tensor of four dimensions, innermost first, to rows of 128 bytes in the 128-byte swizzle, and back. Of stores, what lies
// outside the tensor is left out; who asked for them may wait until they have read shared memory.
DEVICE void copy_box(u32 to, const Map* map, u32 bar, int a, int b, int c, int d) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// The same by a map without a swizzle.
DEVICE void copy_plain_box(u32 to, const Map* map, u32 bar, int a, int b, int c, int d) { copy_box(to, map, bar, a, b, c, d); }
DEVICE void store_box(const Map* map, u32 from, int a, int b, int c, int d) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// What this thread wrote to shared memory may be read by copies that are asked for after a meeting.
DEVICE void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void group_meet(int who) { asm volatile("bar.sync %0, 128;" ::"r"(who + 1) : "memory"); }

// The same of all that multiply.
template <int WARPGROUPS> DEVICE void consumers_meet() { asm volatile("bar.sync 4, %0;" ::"n"(128 * WARPGROUPS) : "memory"); }

// 8x8 matrices of half values, transposed, to or from rows of sixteen bytes: eight lanes in turn give a matrix's rows. Of a matrix,
// each lane has two neighbours of row lane/4.
DEVICE void put_matrices(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void put_two_matrices(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(v[0]), "r"(v[1]) : "memory");
}
DEVICE void get_matrices(u32 (&v)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}
DEVICE void get_two_matrices(u32 (&v)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at) : "memory");
}

// An 8x8 matrix of half values, of which each lane has two neighbours of row lane/4, transposed.
DEVICE u32 transposed(u32 v) { u32 r; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
