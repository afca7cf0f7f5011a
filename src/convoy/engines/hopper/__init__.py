"""Convoy's dense GPU kernels in CUDA C, for features that Triton lacks: im2col copies, clusters, tiles of any multiple of 8.

Importing this package, or an engine of it, imports neither CUDA nor a compiler. `nvrtc_source` composes a kernel's source,
`nvrtc_kernel` compiles it with NVRTC and launches it, and `kernels/` holds the `.cu` files.
"""
