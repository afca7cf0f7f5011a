"""A generator of CUDA C for the subgraphs between layers: elementwise operators, reductions, data movement."""
