"""Code generated for pruned weights: the positions of the non-zero values are part of the code, the values are data.

    problem + mask ──► layout ──► walk ──► kernel IR ──► emit_c    ──► host compiler ──► pruned.c
     (template)        (planes)   (weights)  (ir, text)  emit_cuda ──► NVRTC         ──► pruned.cuda

`layout` is the operator's template: where the padded input lies, so that every tap of every filter reads at a literal offset
and borders need no tests. `walk` goes through the mask and writes the kernel in a small typed IR (`ir`; printed and parsed by
`text`, grammar in docs/kernels/sparse-weights.md). The two emitters turn one IR into C and CUDA C.

After "Code generated for pruned weights", Dong, Liu, Li, Feng; Journal of Software 31(9), 2020. Nearest open relative: SparseRT
(Wang, arXiv 2008.11849).
"""
