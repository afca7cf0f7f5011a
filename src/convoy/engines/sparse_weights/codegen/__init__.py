"""Code generation for pruned weights: weight mask -> kernel IR -> C, x86-64 assembly or CUDA C."""
