"""Our own dense GPU kernels, written in Triton. Importing this package, or an engine of it, does not import triton.

An engine's module holds what is plain Python: which problems it takes, its knobs, its cost model, how buffers become
kernel arguments. The kernels themselves lie in `kernels/` and are imported when the first one is built.
"""
