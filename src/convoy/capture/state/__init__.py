"""What a model keeps between calls in its Python attributes."""
