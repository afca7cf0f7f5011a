"""Packages for CUDA devices: a recorded CUDA graph with its kernels as cubins, written, read and run."""
