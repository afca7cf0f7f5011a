"""The tensors of the user's module: where they lie, and whether they have changed."""
