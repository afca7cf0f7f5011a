// What 2:4 sparse kernels need of Hopper beside hopper.cuh: copies to every block of a cluster, plain copies, sparse operands.
DEVICE void copy_pixels_to_all(u32 to, const Map* map, u32 bar, int c, int w, int h, int n, u16 right, u16 down, u16 ranks) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;"
               ::"r"(to), "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(right), "h"(down), "h"(ranks) : "memory");
}
DEVICE void copy_bytes(u32 to, const unsigned char* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE u32 shared_word(u32 at) { u32 r; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(at) : "memory"); return r; }

// Rows of 64 bytes in the 64-byte swizzle, eight rows an atom (layout 2, 512 bytes from atom to atom).
DEVICE u64 sparse_operand(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (32ull << 32) | (2ull << 62); }

// An 8x8 matrix of half values, of which each lane has two neighbours of row lane/4, transposed.
DEVICE u32 transposed(u32 v) { u32 r; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
