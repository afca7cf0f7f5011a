"""Makes `perfdb_rows` importable in whatever way pytest imports its modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
