"""What PyTorch's options for speed are worth: each alone, the best setting, and the best setting without each."""
