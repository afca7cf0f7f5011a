"""Where one stands: frameworks, options, algorithms and several GPUs side by side, each as a run file.

See docs/how-to/compare.md.
"""

from __future__ import annotations

from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run, read, write

__all__ = ["Figure", "Row", "Run", "read", "write"]
