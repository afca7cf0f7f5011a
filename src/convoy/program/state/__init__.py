"""The user's module: its attributes and items, where its tensors lie, and whether they have changed."""
