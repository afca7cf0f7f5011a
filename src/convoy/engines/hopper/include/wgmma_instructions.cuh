// The products of one warpgroup: 64 rows by 2 * COUNT columns over 32 bytes of each operand's row. Each build replaces
// this file: the text of a wgmma instruction names every register, so nvrtc_source.py writes it for the columns and
// the dtype of the build. These empty functions let an editor and a compiler open a kernel by itself.
#pragma once
#include <wgmma.cuh>

// d += A · B^T; both operands lie with the summed dimension innermost.
template <int COUNT> DEVICE void wgmma(float (&d)[COUNT], u64 a, u64 b) {}
// d = A · B^T.
template <int COUNT> DEVICE void wgmma_zero_init(float (&d)[COUNT], u64 a, u64 b) {}
// d += A · B^T with A transposed, or with both operands transposed.
template <int COUNT> DEVICE void wgmma_transposed_a(float (&d)[COUNT], u64 a, u64 b) {}
template <int COUNT> DEVICE void wgmma_transposed_ab(float (&d)[COUNT], u64 a, u64 b) {}
// d += A · B^T over 32 columns of A, of which sixteen are stored; `metadata` says which ones. HALF: the first or the
// last two lanes of every four give the metadata (PTX ISA, sparsity selector).
template <int HALF, int COUNT> DEVICE void wgmma_sparse(float (&d)[COUNT], u64 a, u64 b, u32 metadata) {}
