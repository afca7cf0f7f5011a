"""A saved plan on a model: a program of it, without a search."""
