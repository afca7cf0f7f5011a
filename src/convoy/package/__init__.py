"""Packages: a net as one file, with graph, plan, packed weights and compiled kernels (docs/reference/package.md)."""

from __future__ import annotations

from convoy.package.export import export
from convoy.package.opening import open  # noqa: A004
from convoy.package.packaged_module import PackagedModule

__all__ = ["PackagedModule", "export", "open"]
