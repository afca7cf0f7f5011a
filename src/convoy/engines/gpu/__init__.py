"""Tensor and support checks that the Triton and the CUDA engines share."""
