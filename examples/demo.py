"""What `make demo` runs: AlexNet on real photographs, tuned for this machine, with plan and report in convoy-demo/.

The first answer is printed within seconds, and measuring improves it until `TIME_S` is up. Ctrl-C takes the best so far.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path("convoy-demo")
TIME_S = sys.argv[1] if len(sys.argv) > 1 else "60"
"""Seconds for the whole command: `python examples/demo.py 20` takes 20."""

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
"""Photographs that lie inside scikit-image's wheel: nothing is downloaded."""


def main() -> int:
    """Write the photographs, then run the command as a user would."""
    import skimage.data
    from PIL import Image

    images = FOLDER / "photographs"
    images.mkdir(parents=True, exist_ok=True)
    for name in PHOTOGRAPHS:
        Image.fromarray(getattr(skimage.data, name)()).save(images / f"{name}.png")
    outputs = {"--plan": "alexnet.plan.json", "--report": "report.html", "--json": "alexnet.json"}
    command = [sys.executable, "-m", "convoy", "optimize", "alexnet", "--input", str(images), "--time", TIME_S]
    for option, file in outputs.items():
        command += [option, str(FOLDER / file)]
    print("$ convoy", *command[3:], flush=True)
    return subprocess.run(command, check=False).returncode  # noqa: S603 - this interpreter, on our own module


if __name__ == "__main__":
    sys.exit(main())
