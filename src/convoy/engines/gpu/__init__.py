"""What GPU kernels share, whichever language they are written in."""
