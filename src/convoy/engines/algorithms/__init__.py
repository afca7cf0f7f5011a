"""Convolution by FFT and by Winograd's minimal filtering, over torch's operations."""
