"""Packages: a net as one file, with graph, plan, packed weights and compiled kernels (docs/reference/package.md)."""

from __future__ import annotations

from convoy.package.export import export
from convoy.package.packaged_module import PackagedModule
from convoy.package.packaged_module import open_package as open  # noqa: A004

__all__ = ["PackagedModule", "export", "open"]
