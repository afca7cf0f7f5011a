"""From a PyTorch model to a graph and its constants."""
