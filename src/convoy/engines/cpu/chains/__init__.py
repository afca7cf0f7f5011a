"""Kernels in C for CPUs that call other kernels, a part of the rows at a time: what lies between stays in a thread's cache."""
