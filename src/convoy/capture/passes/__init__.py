"""Rewrites of a captured graph, one a file, each before --> after in its docstring."""
