"""Packages: a net as one file, with graph, plan, packed weights and compiled kernels (docs/reference/package.md).

Nothing is imported here: opening a package must not import what only exporting needs.
"""
