"""Makes `faulty_engines` importable, here and in the worker processes, which take over sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
