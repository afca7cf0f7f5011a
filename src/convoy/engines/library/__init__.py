"""Engines that call a library: ATen, cuDNN, oneDNN, Inductor, matrix products."""
