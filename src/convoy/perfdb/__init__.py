"""The performance database: measurements in SQLite, and the shipped results beside the user's. The only package with SQL."""

from __future__ import annotations

from convoy.perfdb.database import Database
from convoy.perfdb.location import default_path
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.summary import DatabaseInfo, ImportResult
from convoy.perfdb.transfer import RejectedRow

__all__ = ["Database", "DatabaseInfo", "ImportResult", "Measurement", "RejectedRow", "Status", "default_path"]
