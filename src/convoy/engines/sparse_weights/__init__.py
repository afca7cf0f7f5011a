"""Engines for pruned weights. Generated code holds the positions of the non-zero values; the values themselves are data.

    problem + mask ──► plane_layout ──► lower_mask ──► kernel_ir   ──► emit_c    ──► host compiler ──► pruned.c
                       (planes)         (weights)      (kernel_text)   emit_cuda ──► NVRTC         ──► pruned.cuda

In `codegen/`, `plane_layout` decides where the padded input lies, so that every tap of every filter reads at a literal offset
and borders need no tests. `lower_mask` goes through the mask and writes the kernel in a small typed IR (`kernel_ir`; printed
and parsed by `kernel_text`, grammar in docs/kernels/sparse-weights.md). The two emitters turn one IR into C and CUDA C.

See "Code generated for pruned weights", Dong, Liu, Li, Feng; Journal of Software 31(9), 2020. The nearest open-source
relative is SparseRT (Wang, arXiv 2008.11849).
"""
