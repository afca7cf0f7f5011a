"""Kernels in C for tensors in bf16 on x86 CPUs."""
