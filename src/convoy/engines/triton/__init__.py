"""Dense GPU kernels written in Triton. Importing this package, or an engine of it, does not import triton.

An engine's module is plain Python: support checks, knobs, cost model, and kernel arguments. The kernels themselves are in
`kernels/`, which is imported when the first kernel is built.
"""
