"""The memory: measurements in SQLite. The only package that writes SQL."""

from __future__ import annotations

from convoy.perfdb.database import Database, default_path
from convoy.perfdb.row import Measurement, Status

__all__ = ["Database", "Measurement", "Status", "default_path"]
