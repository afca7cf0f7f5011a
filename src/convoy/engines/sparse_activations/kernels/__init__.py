"""Triton kernels of the engines that skip zeros, and of convolution with pooling."""
