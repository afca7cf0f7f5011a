"""What runs: a plan with its executables, eagerly or as one CUDA graph."""
