"""Kernels in C for CPUs that call other kernels for some rows at a time. The values between them stay in a thread's cache."""
