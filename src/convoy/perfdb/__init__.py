"""The memory: measurements in SQLite, shipped results beside the user's. The only package that writes SQL."""

from __future__ import annotations

from convoy.perfdb.database import Database
from convoy.perfdb.location import default_path
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.summary import Imported, Info
from convoy.perfdb.transfer import Refusal

__all__ = ["Database", "Imported", "Info", "Measurement", "Refusal", "Status", "default_path"]
