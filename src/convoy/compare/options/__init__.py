"""The effect of PyTorch's options for speed: each alone, the best setting, and the best setting without each."""
