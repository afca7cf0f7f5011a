"""Shared by all GPU kernels, in Triton and in CUDA C."""
