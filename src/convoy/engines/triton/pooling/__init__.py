"""Triton engines that pool: in the kernel of the convolution, after it, or alone; and the gradients of poolings."""
