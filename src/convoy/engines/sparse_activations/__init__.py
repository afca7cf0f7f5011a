"""Engines that skip the zeros of feature maps, and that pool in the kernel of the convolution (docs/how-to/sparsity.md)."""
