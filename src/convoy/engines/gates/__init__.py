"""Gates on feature maps: squeeze-and-excitation in two launches of CUDA C kernels."""
