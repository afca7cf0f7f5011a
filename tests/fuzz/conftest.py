"""Makes the modules that the tests of this folder share importable in whatever way pytest imports its modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
