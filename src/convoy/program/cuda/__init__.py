"""CUDA graphs of bound plans: captured, replayed, ordered with other work, and what their kernels tell the cache."""
