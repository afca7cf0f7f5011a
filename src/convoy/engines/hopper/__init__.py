"""Our own dense GPU kernels in CUDA C, for what Triton cannot say: im2col copies, clusters, tiles of any multiple of eight.

Importing this package, or an engine of it, imports neither CUDA nor a compiler. `source` puts a kernel's text together,
`compiled` has NVRTC compile it and launches it, the kernels are the `.cu` files beside them.
"""
