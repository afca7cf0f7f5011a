"""Builds and runs the examples in C and C++."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.package.libconvoy import Libconvoy

EXAMPLES = Path(__file__).parents[3] / "examples" / "libconvoy"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def built(source: Path, compiler: str, flags: tuple[str, ...], libconvoy: Libconvoy, folder: Path) -> Path:
    """The program of an example."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    program, library = folder / source.stem, libconvoy.path.parent
    links = (f"-I{library}", f"-L{library}", "-lconvoy", f"-Wl,-rpath,{library}", "-pthread")
    done = subprocess.run(
        [compiler, *flags, *WARNINGS, str(source), *links, "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return program


def said(*command: object, **variables: str) -> tuple[int, str]:
    """Exit code and output of a program, whose environment has these variables alone."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=variables, timeout=60)
    return done.returncode, done.stdout + done.stderr
